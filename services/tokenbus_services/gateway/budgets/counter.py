"""Counts what the runs of clients used, and settles what their budgets reserve: a group of subscribers of the topic
`runs`, one in each gateway.

The bus delivers each event at least once. What was counted of a run is written by the script that adds to the spend, so
usage is counted exactly once, even if the gateway dies at any point.

Each event with token counts has the run's sum so far, and the script adds what is new since the last one. So a long run
is counted turn by turn, each turn at the price of the model that answered it, and the terminal event adds what no turn
reported: failed attempts, and turns that were cut.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import msgspec
import structlog

from tokenbus.bus.keys import Keys
from tokenbus.bus.layout import locate
from tokenbus.bus.liveness import Liveness, rest, stop_task
from tokenbus.bus.run_record import REQUEST
from tokenbus.bus.scripts.gateway import HoldKeys, RunUse, count_use, hold_longer, release
from tokenbus.bus.server.retry import Defects
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server, translated
from tokenbus.client.client import Client
from tokenbus.client.decode import public_event
from tokenbus.errors import Malformed, ServerError
from tokenbus.events.public import (
    Cancelled,
    Chunk,
    Completed,
    Incomplete,
    RunFailedEvent,
    Started,
    UsageReported,
)
from tokenbus.events.requests import Generate, TextPart
from tokenbus.events.usage import Usage
from tokenbus_services.gateway.budgets.holds import hold_of, newest_hold
from tokenbus_services.gateway.surfaces.contract import payer_in
from tokenbus_services.pricing import PriceTable, token_counts
from tokenbus_services.settings.tables.gateway import KeyRules

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

GROUP = "gateway-spend"
CHARACTERS_PER_TOKEN = 4
RETRY_S = 1.0
_MAX_STARTS = 10_000
_PAGE = 1_000

Counted: TypeAlias = UsageReported | Completed | Incomplete | RunFailedEvent | Cancelled
RulesOf: TypeAlias = Callable[[str], Awaitable[KeyRules | None]]


class RunOwner(msgspec.Struct, frozen=True):
    """Whose run it is, and whom it asks."""

    key: str
    provider: str
    model: str
    others: tuple[tuple[str, str], ...]
    """Its fallbacks: provider and model."""
    hold: str
    """The name under which its reservation is."""


class SpendCounter:
    """One member of the group."""

    def __init__(
        self,
        server: Server,
        bus: Client,
        keys: Keys,
        *,
        prices: PriceTable,
        apis: dict[str, str],
        rules_of: RulesOf,
        keep_ms: int,
    ) -> None:
        """``apis``: the API of each provider. ``keep_ms``: how long what was counted of a run is remembered."""
        self._server = server
        self._bus = bus
        self._keys = keys
        self._prices = prices
        self._apis = apis
        self._rules_of = rules_of
        self._keep_ms = keep_ms
        self._origins: OrderedDict[str, RunOwner | None] = OrderedDict()
        self._task: asyncio.Task[None] | None = None
        self._defects = Defects()
        self._skipped: set[str] = set()
        """Runs with an event that could not be counted, since the last one that could."""
        self._failed_work: Callable[[str], object] = lambda work: None

    async def open(self, liveness: Liveness) -> None:
        """Count in the background."""
        self._failed_work = liveness.failed_work
        self._task = liveness.start(self.run(), name="count of spend")

    async def close(self) -> None:
        """Stop. Another gateway, or this one after its restart, continues."""
        await stop_task(self._task)

    async def run(self) -> None:
        """Count until cancelled, also if the server is unavailable for any time, or one event cannot be counted. Raises
        what always fails.
        """
        while True:
            try:
                kinds = (Started, UsageReported, Completed, Incomplete, RunFailedEvent, Cancelled)
                async with self._bus.subscribe(
                    "runs", group=GROUP, kinds=kinds, from_="start", on_trimmed=_trimmed
                ) as events:
                    async for event in events:
                        await self._count_or_pass(event)
            except ServerError as e:
                log.info("spend_counting_interrupted", error=str(e))
            except Exception as e:  # a defect must not stop the count unnoticed: budgets would no longer limit anything
                log.exception("spend_counting_interrupted")
                self._defects.count(e)
            await rest(RETRY_S)

    async def _count_or_pass(self, event: Started | Counted) -> None:
        """Count one event. One that can never be counted would hold up those of all other clients, so it is skipped.

        Raises its error if no event of many runs in a row could be counted: that is no fault of a single event.
        """
        try:
            await self.count(event)
        except ServerError:
            raise
        except Exception as e:
            log.exception("spend_not_counted", run=event.run)
            self._failed_work("count of spend")
            if event.run not in self._skipped:
                self._skipped.add(event.run)
                self._defects.count(e)
        else:
            if not isinstance(event, Started):  # which is only remembered
                self._skipped.clear()
                self._defects.none()

    async def count(self, event: Started | Counted) -> None:
        """Count one event. Raises ServerError; counting it again is safe."""
        if isinstance(event, Started):
            origin = _origin(event)
            self._remember(event.run, origin)
            if origin is not None:
                await self._hold_longer(origin.hold, origin.key)
            return
        origin = await self._origin_of(event.run)
        if origin is None:  # not a run of a client with a key, or refused before it had one
            if isinstance(event, RunFailedEvent) and event.seq == 0:
                await self._release(event.run)
            return
        usage = event.total if isinstance(event, UsageReported) else event.usage
        if isinstance(event, Cancelled | Incomplete | RunFailedEvent):
            usage = await self._at_least_what_was_heard(event.run, usage)
        provider = event.provider or origin.provider
        name = self._prices.name_for(_names(origin, provider, event.model))
        counts = token_counts(usage, self._apis.get(provider, ""))
        ended = not isinstance(event, UsageReported)
        if name is None and counts.total:
            log.warning("tokens_without_price", run=event.run, provider=provider, model=event.model or origin.model)
        used = RunUse(
            seq=event.seq,
            fresh=counts.fresh,
            cache_read=counts.cache_read,
            cache_write=counts.cache_write,
            output=counts.output,
            prices=self._prices.nano_per_token(name),
            price_name=name or "",
            ended=ended,
        )
        rules = await self._rules_of(origin.key)
        call = count_use(
            self._hold_keys(origin.hold, origin.key),
            origin.hold,
            spend=self._keys.gateway_spend(origin.key),
            use=self._keys.gateway_use(origin.key),
            tokens_per_minute=(rules and rules.tpm_limit) or 0,
            used=used,
            keep_ms=self._keep_ms,
        )
        with translated(self._server):
            await run_script(self._server, call)
        if ended:
            self._origins.pop(event.run, None)

    async def _hold_longer(self, run: str, key: str) -> None:
        """The run has begun, so its reservation is needed for as long as it may be open."""
        rules = await self._rules_of(key)
        if rules is not None and rules.max_budget is not None:
            with translated(self._server):
                await run_script(self._server, hold_longer(self._hold_keys(run, key), run, keep_ms=self._keep_ms))

    async def _release(self, run: str) -> None:
        with translated(self._server):
            if found := await newest_hold(self._server, self._keys, run):
                await run_script(self._server, release(self._hold_keys(*found), found[0], ended=True))

    def _hold_keys(self, run: str, key: str) -> HoldKeys:
        return HoldKeys(self._keys.gateway_counted(run), self._keys.gateway_held(key))

    async def _origin_of(self, run: str) -> RunOwner | None:
        if run in self._origins:
            return self._origins[run]
        # Another gateway counted its beginning.
        with translated(self._server):
            await locate(self._server, self._keys, run)
            first: list[Any] = await self._server.client.xrange(self._keys.log(run), count=1)
        if not first:
            # Nothing says whose it is, or what it asked for. No later event will, so nothing stays reserved for it.
            await self._release(run)
            log.error("spend_lost", run=run, why="the run's log is gone")
            self._failed_work("spend of a run without a log")
        events = _events(first)
        origin = _origin(events[0]) if events and isinstance(events[0], Started) else None
        self._remember(run, origin)
        return origin

    def _remember(self, run: str, origin: RunOwner | None) -> None:
        self._origins[run] = origin
        while len(self._origins) > _MAX_STARTS:
            self._origins.popitem(last=False)

    async def _at_least_what_was_heard(self, run: str, reported: Usage | None) -> Usage | None:
        """The usage of a run that did not complete: not less than its text, though no provider reported it.

        Most providers report usage only at the end of an answer. Without this, a client that always leaves before the
        end would pay for nothing.
        """
        characters = await self._written(run)
        if not characters:
            return reported
        reported = reported or Usage()
        written = -(-characters // CHARACTERS_PER_TOKEN)
        given = reported.input
        if given is None:
            given = -(-await self._request_characters(run) // CHARACTERS_PER_TOKEN)
        return msgspec.structs.replace(reported, input=given, output=max(written, reported.output or 0))

    async def _written(self, run: str) -> int:
        """Characters of all chunks of the run."""
        characters, after = 0, "-"
        while True:
            with translated(self._server):
                await locate(self._server, self._keys, run)
                page: list[Any] = await self._server.client.xrange(self._keys.log(run), after, count=_PAGE)
            characters += sum(len(event.text) for event in _events(page) if isinstance(event, Chunk))
            if len(page) < _PAGE:
                return characters
            after = f"({page[-1][0].decode()}"

    async def _request_characters(self, run: str) -> int:
        """Characters of the request's texts; 0 if it is no longer stored."""
        with translated(self._server):
            await locate(self._server, self._keys, run)
            stored: bytes | None = await self._server.client.hget(self._keys.run(run), REQUEST)
        if stored is None:
            return 0
        try:
            return _characters(msgspec.json.decode(stored, type=Generate))
        except msgspec.DecodeError:
            return 0


def _characters(request: Generate) -> int:
    contents = [message.content for message in request.messages]
    texts: list[str] = []
    for content in (*contents, request.system or ""):
        parts: Sequence[Any] = [content] if isinstance(content, str) else content
        texts += [part if isinstance(part, str) else part.text for part in parts if isinstance(part, str | TextPart)]
    return sum(map(len, texts))


def _origin(event: Started) -> RunOwner | None:
    if (payer := payer_in(event.metadata)) is None:
        return None
    others = tuple((choice.provider, choice.model) for choice in event.fallback or ())
    return RunOwner(payer.key, event.provider, event.model, others, hold_of(event.run, payer))


def _names(origin: RunOwner, provider: str, answered: str | None) -> list[str]:
    """Names to look for a price: what answered, and what was asked of that provider."""
    models = [origin.model] if provider == origin.provider else []
    models += [model for name, model in origin.others if name == provider]
    return [f"{provider}/{model}" for model in (answered, *models) if model]


def _events(entries: list[Any]) -> list[Any]:
    found: list[Any] = []
    for entry in entries:
        try:
            found.append(public_event("", entry))
        except Malformed:
            continue
    return found


def _trimmed(gap: object) -> None:
    """The topic was trimmed before these events were counted: no member of the group ran for a long time."""
    log.error("spend_lost", gap=str(gap))
