"""Timeouts that the parser's clock sends to a run: its deadline has passed, or no worker processes it."""

from __future__ import annotations

from typing import Literal, TypeAlias

from tokenbus.bus.scripts.runs.accept import STOP
from tokenbus.bus.scripts.script import NOW, ROOM, ScriptCall, script

RunIs: TypeAlias = Literal["open", "abandoned", "ended"]
"""A run's state by its hash: the run may be written to, its keys are gone or refuse all writes, or it has ended."""

_EXPIRE = script(
    "expire",
    """
-- End a run whose deadline has passed.
-- KEYS: 1 run (hash), 2 events, 3 raw, 4 control (streams), 5 lease of the parser, 6 lease of the normalizer
-- (hashes).
-- ARGV: 1 run, 2 event, 3 control message.
-- Reply: 'expiring', 'gone', or the status of a run that is not open.
-- Atomic: as for `cancel`.
"""
    + STOP
    + """
local h = redis.call('HMGET', KEYS[1], 'status', 'attempt', 'closed', 'turn')
if h[1] and h[1] ~= 'open' then return h[1] end
ROOM
redis.call('XADD', KEYS[2], '*', ARGV[1], ARGV[2])
redis.call('HINCRBY', KEYS[5], 'arrived', #ARGV[2])
if not h[1] then return 'gone' end
return stop(h, ARGV[3], 'the deadline of the run has passed', 'expiring')
""".replace("ROOM", ROOM),
)


def expire(
    run_key: str,
    events: str,
    raw: str,
    control: str,
    *,
    parser_lease: str,
    normalizer_lease: str,
    run: str,
    frame: bytes,
    control_frame: bytes,
) -> ScriptCall:
    """Expire an open run whose deadline has passed: refuse further writes of its attempt, notify its workers, and let
    the parser end it.

    Reply: ``expiring``; the run's status if it is no longer open (nothing is written then); ``gone`` if its keys have
    expired: the parser may still have the run and is notified.
    """
    keys = [run_key, events, raw, control, parser_lease, normalizer_lease]
    return ScriptCall(_EXPIRE, keys, [run, frame, control_frame])


_APPEND_TIMEOUT = script(
    "append_timeout",
    """
-- Append a timeout to the events of a run.
-- KEYS: 1 run (hash), 2 events (stream), 3 lease of the parser (hash).
-- ARGV: 1 run, 2 event, 3 what the hash must say: 'open' (or it is gone), 'abandoned' (anything but open), 'ended'.
-- Reply: 1, or 0 if the hash forbids it.
-- Atomic: the event and the count of its bytes are written together, and only while the hash allows it.
local status = redis.call('HGET', KEYS[1], 'status')
if ARGV[3] == 'ended' then
  if not (status == 'completed' or status == 'incomplete' or status == 'failed' or status == 'cancelled') then
    return 0
  end
elseif ARGV[3] == 'abandoned' then
  if status == 'open' then return 0 end
elseif status and status ~= 'open' then
  return 0
end
ROOM
redis.call('XADD', KEYS[2], '*', ARGV[1], ARGV[2])
redis.call('HINCRBY', KEYS[3], 'arrived', #ARGV[2])
return 1
""".replace("ROOM", ROOM),
)


def append_timeout(
    run_key: str, events: str, parser_lease: str, *, run: str, frame: bytes, only_if: RunIs = "open"
) -> ScriptCall:
    """Append a timeout event to `events`: 1, or 0 if the run's hash does not say what it must. Fences nothing; the
    parser may find that the timeout does not apply.
    """
    return ScriptCall(_APPEND_TIMEOUT, [run_key, events, parser_lease], [run, frame, only_if])


_READ_POLICY_STAGE = script(
    "judges",
    """
-- Read the state of a partition's policy stage.
-- KEYS: 1 lease of the policy stage (hash).
-- ARGV: none.
-- Reply: whether a worker owns it, its unread bytes, its offset.
-- Atomic: the lease is compared with the server's own clock.
"""
    + NOW
    + """
local h = redis.call('HMGET', KEYS[1], 'owner', 'until', 'arrived', 'done', 'offset')
local alive = h[1] and tonumber(h[2] or '0') > now and 1 or 0
return {alive, tonumber(h[3] or '0') - tonumber(h[4] or '0'), h[5] or '0-0'}
""",
)


def read_policy_stage(policy_lease: str) -> ScriptCall:
    """State of the policy stage in a partition: whether a worker owns it (1 or 0), its unread bytes, and its committed
    offset.
    """
    return ScriptCall(_READ_POLICY_STAGE, [policy_lease], [])
