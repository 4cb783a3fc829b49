"""Rate limits that all fetchers share: one atomic step reserves a call's capacity in all of its scopes.

A scope (a provider, a model, a tenant) has two keys. The first is a hash with the fields

- ``requests`` and ``tokens``: times in µs up to which reserved capacity is paid for. This is GCRA, the generic cell
  rate algorithm (ITU-T I.371): a token bucket that refills steadily, stored as one number;
- ``paused``: the time before which no call may start, because the provider said so;
- ``wait:<worker>``: since when a worker waits here, when its place expires, and for how many tokens. A refused worker
  goes before later ones, so that small requests do not starve a large one, nor one fetcher another.

The second, ``…:held``, is a sorted set of the running calls, scored by the time at which each counts as dead.

All keys of a deployment lie in one slot and expire once they hold no information.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from tokenbus.bus.scripts.script import Arg, ScriptCall, script

Kind = Literal["model", "provider", "tenant"]

MINUTE_US = 60_000_000
POLL_MS = 50
"""When to ask again if the time cannot be known, because a running call may end at any time."""
TICKET_MS = 1_000
"""How long the queue keeps the place of a worker that does not ask again."""
MAX_PLACES = 1_000
"""Most fields of a scope. Workers beyond it wait without a place."""


class Scope(msgspec.Struct, frozen=True):
    """A limited resource: its keys and its limits. 0: no limit of this kind."""

    kind: Kind
    key: str
    requests_per_second: float = 0.0
    """The burst is one second's worth, and at least one request."""
    tokens_per_minute: int = 0
    """The burst is one minute's worth."""
    concurrency: int = 0

    @property
    def held(self) -> str:
        """Key of the sorted set of its running calls."""
        return f"{self.key}:held"


def reserve(scopes: Sequence[Scope], *, member: str, worker: str, tokens: int, lease_ms: int) -> ScriptCall:
    """Reserve one request, ``tokens`` and a slot among the running calls in every scope, or nothing at all.

    ``member`` names the call. It holds its slot for ``lease_ms`` unless `renew` extends it.

    Reply: ``['ok', time up to which the tokens of each scope are taken…]`` (for `refund`); ``['wait', n, ms]``: the
    ``n``-th scope refused, retry after ``ms``; ``['already', time…]``: this call has its slot (its reply was
    lost). If no scope limits concurrency, sending it again after a lost reply reserves a second time.
    """
    limits: list[Arg] = []
    for scope in scopes:
        limits += [repr(float(scope.requests_per_second)), scope.tokens_per_minute, scope.concurrency]
    return _reserve(_keys(scopes), member=member, worker=worker, tokens=tokens, lease_ms=lease_ms, limits=limits)


@script(MINUTE_US=MINUTE_US, POLL_US=POLL_MS * 1000, TICKET_US=TICKET_MS * 1000, MAX_PLACES=MAX_PLACES)
def _reserve(
    scopes: Sequence[str], *, member: str, worker: str, tokens: int, lease_ms: int, limits: Sequence[Arg]
) -> ScriptCall: ...


def _keys(scopes: Sequence[Scope]) -> list[str]:
    return [key for scope in scopes for key in (scope.key, scope.held)]


@script()
def renew(held: str, *, lease_ms: int, members: Sequence[str]) -> ScriptCall:
    """Extend the slots of these running calls of a scope to ``lease_ms`` from now.

    A renewal that arrives after its call ended changes nothing.
    """
    ...


def refund(scopes: Sequence[Scope], *, member: str, left: int, taken: Sequence[int]) -> ScriptCall:
    """End the call: free its slots and return ``left`` unused tokens of its reservation (negative: it used more).
    ``taken`` is the reply of `reserve`. Not idempotent: send it once only.
    """
    pairs = [n for scope, until in zip(scopes, taken, strict=True) for n in (scope.tokens_per_minute, until)]
    return _refund(_keys(scopes), member=member, left=left, taken=pairs)


@script(MINUTE_US=MINUTE_US, TICKET_US=TICKET_MS * 1000)
def _refund(scopes: Sequence[str], *, member: str, left: int, taken: Sequence[int]) -> ScriptCall: ...


@script()
def pause(scope: str, *, ms: int) -> ScriptCall:
    """Block calls in the scope with this key for ``ms``. A longer pause that is already set stays."""
    ...


@script()
def spend(spent: str, *, size: int, most: int, period_ms: int) -> ScriptCall:
    """Count ``size`` bytes that stay for ``period_ms`` in a bucket of ``most`` bytes that refills within that time, so
    that at most twice as many stay at any time. Reply: 0, or after how many ms there is room.
    """
    ...
