"""Counters of the policy stage in a run's hash: how often a policy ended its executor, and how often its worker was
lost.

A worker that judges a run writes its token to the hash, with a word that says whether the run has an executor of its
own. A next owner that finds the token of another worker there, which did not release its lease, knows that this worker
was lost with the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from tokenbus.bus.scripts.script import ROOM, Arg, ScriptCall, script

Place = Literal["beside", "alone"]
"""Where a run is judged: together with other runs, or alone in an executor."""

AT = "policies_at"
LOST_BESIDE, LOST_ALONE = "workers_lost:beside", "workers_lost:alone"
UNEXPLAINED = "unexplained_ends"
"""Field of a run's hash: how often its own executor ended because of an unknown one of its policies."""

_OF_OWNER = """
if redis.call('HGET', KEYS[2], 'token') ~= ARGV[1] then return 'fenced' end
local status = redis.call('HGET', KEYS[1], 'status')
if status ~= 'open' then return status or 'gone' end
"""
_STARTS = script(
    "policy_starts",
    """
-- Read a run's failed starts, and record that this worker judges the run.
-- KEYS: 1 run (hash), 2 lease of the policy stage (hash).
-- ARGV: 1 token, 2 and further: fields to read.
-- Reply: their values; or why not: 'fenced', 'gone', or the run's status.
-- Atomic: the worker before counts as lost once, however many workers look.
"""
    + _OF_OWNER
    + """
local place, last = string.match(redis.call('HGET', KEYS[1], 'AT') or '', '^(%a+) (.+)$')
if last ~= ARGV[1] then
  ROOM  if last and last ~= redis.call('HGET', KEYS[2], 'released') then
    redis.call('HINCRBY', KEYS[1], 'workers_lost:' .. place, 1)
  end
  redis.call('HSET', KEYS[1], 'AT', 'beside ' .. ARGV[1])
end
return redis.call('HMGET', KEYS[1], unpack(ARGV, 2))
""".replace("AT'", f"{AT}'").replace("ROOM", ROOM),
)
_NOTE = script(
    "note_of_policies",
    """
-- Set a field of a run, for the worker that judges it.
-- KEYS: 1 run (hash), 2 lease of the policy stage (hash).
-- ARGV: 1 token, 2 field, 3 value.
-- Reply: the value if it is a number, else 0; or as `policy_starts`.
-- Atomic: a worker that lost the partition writes nothing.
"""
    + _OF_OWNER
    + ROOM
    + "redis.call('HSET', KEYS[1], ARGV[2], ARGV[3])\nreturn tonumber(ARGV[3]) or 0\n",
)
_COUNT_START = script(
    "count_policy_start",
    """
-- Set how many starts failed by a policy, and the last place of a failure.
-- KEYS: 1 run (hash), 2 lease of the policy stage (hash).
-- ARGV: 1 token, 2 field of the count, 3 count, 4 field of the place, 5 place.
-- Reply: count and place; or as `policy_starts`.
-- Atomic: as for `note_of_policies`; the place never goes back.
"""
    + _OF_OWNER
    + ROOM
    + """
local at = tonumber(ARGV[5])
redis.call('HSET', KEYS[1], ARGV[2], ARGV[3])
local before = tonumber(redis.call('HGET', KEYS[1], ARGV[4]) or '0')
if at > before then
  redis.call('HSET', KEYS[1], ARGV[4], at)
  before = at
end
return {tonumber(ARGV[3]), before}
""",
)


def starts_field(policy: str) -> str:
    """Field of a run's hash that counts the starts held against a policy."""
    return f"starts:{policy}"


def failed_at_field(policy: str) -> str:
    """Field of a run's hash with the last position at which a policy crashed its executor."""
    return f"failed_at:{policy}"


def policy_starts(run_key: str, policy_lease: str, *, token: str, policies: Sequence[str]) -> ScriptCall:
    """Read a run's counters for the owner of the policy lease with ``token``, and write down that it judges the run
    from now on, together with others. If the worker before was lost with the run, this is counted.

    The same call may be sent again after a lost reply. Reply: `LOST_BESIDE`, `LOST_ALONE`, `UNEXPLAINED`, then two
    values per policy, `starts_field` and `failed_at_field`; or ``fenced``, ``gone``, or the run's status if it is no
    longer open.
    """
    fields = [LOST_BESIDE, LOST_ALONE, UNEXPLAINED]
    fields += [field(policy) for policy in policies for field in (starts_field, failed_at_field)]
    return ScriptCall(_STARTS, [run_key, policy_lease], [token, *fields])


def note_place(run_key: str, policy_lease: str, *, token: str, place: Place) -> ScriptCall:
    """Write down where the owner judges the run now. Reply: 0, or the refusals of `policy_starts`."""
    return _note(run_key, policy_lease, token, AT, f"{place} {token}")


def note_unexplained(run_key: str, policy_lease: str, *, token: str, ends: int) -> ScriptCall:
    """Set how often an executor of the run ended because of an unknown policy. Reply: the number, or the refusals
    of `policy_starts`.
    """
    return _note(run_key, policy_lease, token, UNEXPLAINED, ends)


def _note(run_key: str, policy_lease: str, token: str, field: str, value: Arg) -> ScriptCall:
    return ScriptCall(_NOTE, [run_key, policy_lease], [token, field, value])


def count_policy_start(
    run_key: str, policy_lease: str, *, token: str, policy: str, starts: int, failed_at: int = 0
) -> ScriptCall:
    """Set how many starts are held against a policy; ``failed_at``: the position at which the last one failed.

    The owner alone writes them and knows them, so the same call may be sent again after a lost reply. Reply: the new
    values of both fields, or the refusals of `policy_starts`.
    """
    fields = [starts_field(policy), starts, failed_at_field(policy), failed_at]
    return ScriptCall(_COUNT_START, [run_key, policy_lease], [token, *fields])
