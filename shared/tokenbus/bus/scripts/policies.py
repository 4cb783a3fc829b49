"""Counters of the policy stage in a run's hash: how often a policy crashed its executor."""

from __future__ import annotations

from collections.abc import Sequence

from tokenbus.bus.scripts.script import ROOM, ScriptCall, script

_OF_OWNER = """
if redis.call('HGET', KEYS[2], 'token') ~= ARGV[1] then return 'fenced' end
local status = redis.call('HGET', KEYS[1], 'status')
if status ~= 'open' then return status or 'gone' end
"""
_STARTS = script("policy_starts", _OF_OWNER + "return redis.call('HMGET', KEYS[1], unpack(ARGV, 2))\n")
_COUNT_START = script(
    "count_policy_start",
    _OF_OWNER
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
    """Read the failure counters of a run's policies, for the owner of the policy lease with ``token``.

    Reply: two values per policy, `starts_field` and `failed_at_field`; or ``fenced``, ``gone``, or the run's status if
    it is no longer open.
    """
    fields = [field(policy) for policy in policies for field in (starts_field, failed_at_field)]
    return ScriptCall(_STARTS, [run_key, policy_lease], [token, *fields])


def count_policy_start(
    run_key: str, policy_lease: str, *, token: str, policy: str, starts: int, failed_at: int = 0
) -> ScriptCall:
    """Set how many starts are held against a policy; ``failed_at``: the position at which the last one failed.

    The owner alone writes them and knows them, so the same call may be sent again after a lost reply. Reply: the new
    values of both fields, or the refusals of `policy_starts`.
    """
    fields = [starts_field(policy), starts, failed_at_field(policy), failed_at]
    return ScriptCall(_COUNT_START, [run_key, policy_lease], [token, *fields])
