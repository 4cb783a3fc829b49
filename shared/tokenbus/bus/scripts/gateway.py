"""The gateway's scripts: entries of keys, admission of a request, and the count of what a run used.

All of its keys lie in one slot. A client has five: rates (``use``), open answers (``use:open``), spend, and what its
budget holds back (``held`` and ``held:ends``).

``use`` holds two buckets, each a level and the time of that level: ``requests`` and ``tokens``. Both refill steadily to
one minute's worth. A request takes one of ``requests`` on admission. Tokens are taken when a run reports them, so the
level may fall below 0; requests are refused until it is above.

``held`` and ``ends`` hold what is reserved for runs that were admitted and not yet counted to their end. A reservation
is part of the budget, shrinks as the run is counted, and expires with a lease: soon for a run that never starts. So it
is settled by whichever gateway counts the run, also if the one that admitted it was killed.

``spend`` holds, for each day since 1970 (UTC) and for ``total``, the fields ``<day>:cost``, ``:input``, ``:output`` and
``:runs``, and the total cost by price (``price:<name>:cost``). Costs are whole billionths of the currency.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenbus.bus.scripts.script import MAX_VALUES, Arg, ScriptCall, script

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


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """What a budget holds back for one run."""

    client: str
    estimate_nano: int = 0
    hold_ms: int = 0
    """How long for a run that does not start."""
    keep_ms: int = 1
    """How long what is known of the run is kept; longer than it may be open."""


class AdmissionReply(msgspec.Struct, frozen=True, array_like=True):
    """The decision about a request. Levels of -1: not limited."""

    refused: str
    """``""``, ``budget`` (it is spent), ``reserved`` (the rest of it is), ``requests``, ``tokens`` or ``concurrency``.
    """
    retry_ms: int
    requests_left: int
    requests_full_ms: int
    tokens_left: int
    tokens_full_ms: int
    spent_nano: int
    """In the budget's period."""


class HoldKeys(msgspec.Struct, frozen=True):
    """The keys of what is reserved for one run."""

    counted: str
    held: str

    @property
    def ends(self) -> str:
        """When each reservation of the client expires."""
        return f"{self.held}:ends"


def admit(
    use: str,
    spend: str,
    run: str,
    limits: AdmissionLimits,
    *,
    gateway: str,
    lease_ms: int,
    hold: HoldKeys,
    held_as: str = "",
    reserved: Reservation,
    above: Sequence[str] = (),
) -> ScriptCall:
    """Admit a request if no limit of its client is reached, and take its share of them. Reply: see `AdmissionReply`.

    The run counts as an open answer of this ``gateway`` for ``lease_ms``, or until it is renewed or left: a run that
    is read at two gateways counts once, until both have left. With a budget, its estimate is
    held back until the run's end is counted (`count_use`), it is released, or it expires.

    ``held_as``: the name of what is held, if that is not the run's id.

    ``above``: of a child run, the names under which what the runs above it may cost is held. That leaves it room,
    because they wait for it. A child run that was admitted is admitted again, and takes nothing more.
    """
    return _admit(
        use,
        f"{use}:open",
        spend,
        hold.counted,
        hold.held,
        hold.ends,
        run=held_as or run,
        rpm=limits.requests_per_minute,
        tpm=limits.tokens_per_minute,
        most=limits.concurrency,
        place=place_of(run, gateway),
        budget=limits.budget_nano,
        period=limits.period,
        lease_ms=lease_ms,
        client=reserved.client,
        estimate=reserved.estimate_nano,
        hold_ms=reserved.hold_ms,
        keep_ms=reserved.keep_ms,
        above=above,
    )


@script(MAX_VALUES=MAX_VALUES)
def _admit(
    use: str,
    answers: str,
    spend: str,
    counted: str,
    held: str,
    ends: str,
    *,
    run: str,
    rpm: int,
    tpm: int,
    most: int,
    place: str,
    budget: int,
    period: str,
    lease_ms: int,
    client: str,
    estimate: int,
    hold_ms: int,
    keep_ms: int,
    above: Sequence[str],
) -> ScriptCall: ...


def hold_longer(keys: HoldKeys, run: str, *, keep_ms: int) -> ScriptCall:
    """Hold what is reserved for a run for ``keep_ms``, also if that has expired. Reply: 1 if something is held."""
    return _hold(keys.counted, keys.held, keys.ends, run=run, keep_ms=keep_ms)


@script()
def _hold(counted: str, held: str, ends: str, *, run: str, keep_ms: int) -> ScriptCall: ...


def release(keys: HoldKeys, run: str, *, ended: bool) -> ScriptCall:
    """Hold nothing for a run that was not published or, ``ended``, not accepted. Reply: none."""
    return _release(keys.counted, keys.held, keys.ends, run=run, ended=int(ended))


@script()
def _release(counted: str, held: str, ends: str, *, run: str, ended: int) -> ScriptCall: ...


def place_of(run: str, gateway: str) -> str:
    """The member of the set of open answers, of its own for each gateway: the first to leave frees no other's place."""
    return f"{run} {gateway}"


MOST_RENEWED = 1000
"""Most answers of one call of `renew_open`."""


def renew_open(use: str, runs: Sequence[str], *, gateway: str, lease_ms: int) -> ScriptCall:
    """Keep the places of this gateway's open answers for ``lease_ms`` more."""
    return _renew_open(f"{use}:open", lease_ms=lease_ms, places=[place_of(run, gateway) for run in runs])


@script()
def _renew_open(answers: str, *, lease_ms: int, places: Sequence[str]) -> ScriptCall: ...


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


def count_use(
    hold: HoldKeys, run: str, *, spend: str, use: str, tokens_per_minute: int, used: RunUse, keep_ms: int
) -> ScriptCall:
    """Add to a client's spend what its run used since the last count, once for each event however often it is sent;
    what is held back for the run shrinks by it, and is released at the end.

    Reply: 1 if it was counted, 0 if this event, or a later one of the run, was counted before. ``keep_ms``: how long
    that is known; longer than an event of an open or just ended run may come again.
    """
    counts = (used.fresh, used.cache_read, used.cache_write, used.output)
    return _count_use(
        hold.counted,
        spend,
        use,
        hold.held,
        hold.ends,
        run=run,
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
    held: str,
    ends: str,
    *,
    run: str,
    seq: int,
    keep_ms: int,
    tokens_per_minute: int,
    price_name: str,
    ended: int,
    counts: Sequence[Arg],
) -> ScriptCall: ...
