"""Guarded writes to the inputs of an open run: tool results and progress, and policy verdicts."""

from __future__ import annotations

from tokenbus.bus.run_record import call_field
from tokenbus.bus.scripts.script import ROOM, ScriptCall, script

_OF_OPEN_CALL = """
local h = redis.call('HMGET', KEYS[1], 'status', ARGV[2])
if h[1] ~= 'open' or h[2] ~= ARGV[3] then return 0 end
ROOM
redis.call('XADD', KEYS[2], '*', ARGV[1], ARGV[4])
redis.call('HINCRBY', KEYS[3], 'arrived', #ARGV[4])
""".replace("ROOM", ROOM)
_TOOL_RESULT = script(
    "tool_result",
    """
-- Append a tool's result, and close its call.
-- KEYS: 1 run (hash), 2 events (stream), 3 lease of the parser (hash).
-- ARGV: 1 run, 2 field of the call, 3 attempt, 4 event.
-- Reply: 1, or 0 if the call is not open.
-- Atomic: of two results, one is appended.
"""
    + _OF_OPEN_CALL
    + "redis.call('HDEL', KEYS[1], ARGV[2])\nreturn 1\n",
)
_TOOL_PROGRESS = script(
    "tool_progress",
    """
-- Append a tool's progress. The call stays open.
-- KEYS: 1 run (hash), 2 events (stream), 3 lease of the parser (hash).
-- ARGV: 1 run, 2 field of the call, 3 attempt, 4 event.
-- Reply: 1, or 0 if the call is not open.
-- Atomic: no progress follows the call's result.
"""
    + _OF_OPEN_CALL
    + "return 1\n",
)


def tool_result(
    run_key: str, events: str, parser_lease: str, *, run: str, block: int, attempt: int, frame: bytes
) -> ScriptCall:
    """Submit a tool's result: 1, or 0 if the call is not open (a second result, a cancel, a newer attempt)."""
    return ScriptCall(_TOOL_RESULT, [run_key, events, parser_lease], [run, call_field(block), attempt, frame])


def tool_progress(
    run_key: str, events: str, parser_lease: str, *, run: str, block: int, attempt: int, frame: bytes
) -> ScriptCall:
    """Submit progress of a call, which stays open: 1, or 0 if it is not open. Sent again, it is published again."""
    return ScriptCall(_TOOL_PROGRESS, [run_key, events, parser_lease], [run, call_field(block), attempt, frame])


_APPEND_VERDICTS = script(
    "rule",
    """
-- Append policy verdicts of a run.
-- KEYS: 1 run (hash), 2 events (stream), 3 lease of the parser, 4 lease of the policy stage (hashes).
-- ARGV: 1 run, 2 token, 3 event.
-- Reply: 'ok', 'fenced', 'gone', or the status of a run that is not open.
-- Atomic: a worker that lost the partition appends nothing.
if redis.call('HGET', KEYS[4], 'token') ~= ARGV[2] then return 'fenced' end
local status = redis.call('HGET', KEYS[1], 'status')
if status ~= 'open' then return status or 'gone' end
ROOM
redis.call('XADD', KEYS[2], '*', ARGV[1], ARGV[3])
redis.call('HINCRBY', KEYS[3], 'arrived', #ARGV[3])
return 'ok'
""".replace("ROOM", ROOM),
)


def append_verdicts(
    run_key: str, events: str, parser_lease: str, policy_lease: str, *, run: str, token: str, frame: bytes
) -> ScriptCall:
    """Submit policy verdicts of a run, as the owner of the policy lease with ``token``.

    Reply: ``ok``; or ``fenced``, ``gone``, or the run's status if it is no longer open: these write nothing. A retry
    after a lost reply may append it twice; the parser applies each part once.
    """
    return ScriptCall(_APPEND_VERDICTS, [run_key, events, parser_lease, policy_lease], [run, token, frame])
