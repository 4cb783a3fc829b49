"""The gateway's scripts: entries of keys, admission of a request, and the count of what a run used.

All of its keys lie in one slot. A client has three: rates (``use``), open answers (``use:open``) and spend.

``use`` holds two buckets, each a level and the time of that level: ``requests`` and ``tokens``. Both refill steadily to
one minute's worth. A request takes one of ``requests`` on admission. Tokens are taken when a run reports them, so the
level may fall below 0; requests are refused until it is above.

``spend`` holds, for each day since 1970 (UTC) and for ``total``, the fields ``<day>:cost``, ``:input``, ``:output`` and
``:runs``, and the total cost by price (``price:<name>:cost``). Costs are whole billionths of the currency.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenbus.bus.scripts.script import Arg, ScriptCall, script

DAY_MS = 86_400_000
NANO = 1_000_000_000
"""Units of cost per unit of currency."""


@script()
def put_key(keys: str, *, key_id: str, before: bytes, entry: bytes) -> ScriptCall:
    """Store the entry of a key if it still is ``before`` (empty: there is none). Reply: 1 if it was stored."""
    ...


class AdmissionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one client. 0: none of this kind."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrency: int = 0
    budget_nano: int = 0
    period: str = ""
    """``day``, ``week`` or ``month``; empty: the budget is for all time."""


class AdmissionReply(msgspec.Struct, frozen=True, array_like=True):
    """The decision about a request. Levels of -1: not limited."""

    refused: str
    """``""``, ``budget``, ``requests``, ``tokens`` or ``concurrency``."""
    retry_ms: int
    requests_left: int
    requests_full_ms: int
    tokens_left: int
    tokens_full_ms: int
    spent_nano: int
    """In the budget's period."""


def admit(use: str, spend: str, run: str, limits: AdmissionLimits, *, lease_ms: int) -> ScriptCall:
    """Admit a request if no limit of its client is reached, and take its share of them. Reply: see `AdmissionReply`.

    The run counts as an open answer for ``lease_ms``, or until it is renewed or left.
    """
    return _admit(
        use,
        f"{use}:open",
        spend,
        run=run,
        rpm=limits.requests_per_minute,
        tpm=limits.tokens_per_minute,
        most=limits.concurrency,
        budget=limits.budget_nano,
        period=limits.period,
        lease_ms=lease_ms,
    )


@script()
def _admit(
    use: str,
    answers: str,
    spend: str,
    *,
    run: str,
    rpm: int,
    tpm: int,
    most: int,
    budget: int,
    period: str,
    lease_ms: int,
) -> ScriptCall: ...


def renew_open(use: str, runs: list[str], *, lease_ms: int) -> ScriptCall:
    """Keep the places of these open answers for ``lease_ms`` more."""
    return _renew_open(f"{use}:open", lease_ms=lease_ms, runs=runs)


@script()
def _renew_open(answers: str, *, lease_ms: int, runs: Sequence[str]) -> ScriptCall: ...


class RunUse(msgspec.Struct, frozen=True, kw_only=True):
    """What a run used from its beginning to the event ``seq``, and what that costs."""

    seq: int
    fresh: int
    """Input that was neither read from the provider's cache nor written to it."""
    cache_read: int
    cache_write: int
    output: int
    prices: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    """Billionths of the currency per token, in the order of the counts. They apply to what is new since the last
    count.
    """
    price_name: str = ""
    ended: bool = False


def count_use(counted: str, *, spend: str, use: str, tokens_per_minute: int, used: RunUse, keep_ms: int) -> ScriptCall:
    """Add to a client's spend what its run used since the last count, once for each event however often it is sent.

    Reply: 1 if it was counted, 0 if this event, or a later one of the run, was counted before. ``keep_ms``: how long
    that is known; longer than an event of an open or just ended run may come again.
    """
    counts = (used.fresh, used.cache_read, used.cache_write, used.output)
    return _count_use(
        counted,
        spend,
        use,
        seq=used.seq,
        keep_ms=keep_ms,
        tokens_per_minute=tokens_per_minute,
        price_name=used.price_name,
        ended=int(used.ended),
        counts=(*counts, *(f"{price:.6f}" for price in used.prices)),
    )


@script()
def _count_use(
    counted: str,
    spend: str,
    use: str,
    *,
    seq: int,
    keep_ms: int,
    tokens_per_minute: int,
    price_name: str,
    ended: int,
    counts: Sequence[Arg],
) -> ScriptCall: ...
