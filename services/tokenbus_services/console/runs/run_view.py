"""What the console says of a run: a row, folded from its events, and its turn in front of the provider. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias, cast

import msgspec
from redis.exceptions import NoPermissionError, ResponseError

from tokenbus.bus.keys import Keys
from tokenbus.bus.scripts.gateway import NANO
from tokenbus.bus.scripts.work_queue import NOBODY
from tokenbus.bus.server.server import Server
from tokenbus.events import public
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import TurnWork, turn_decoder
from tokenbus.events.usage import Usage
from tokenbus_services.console.access.hiding import hidden_error
from tokenbus_services.pricing import PriceTable, token_counts
from tokenbus_services.settings import Settings

State = Literal[
    "queued",
    "waiting",
    "first_byte",
    "thinking",
    "speaking",
    "tool",
    "retrying",
    "judged",
    "completed",
    "incomplete",
    "failed",
    "cancelled",
]
MAX_WORDS = 120
"""Characters of a run's last words."""
CHARACTERS_PER_TOKEN = 4
_BLANKS = re.compile(r"\s+")
_STATES_OF_KINDS: dict[str, State] = {
    "text": "speaking",
    "audio": "speaking",
    "thinking": "thinking",
    "tool_call": "tool",
    "server_tool": "tool",
}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the river."""

    run: str
    state: State
    tenant: str | None = None
    provider: str | None = None
    model: str | None = None
    started_at: int | None = None
    """Unix time in ms, like `ended_at`."""
    ended_at: int | None = None
    finish: str | None = None
    error: str | None = None
    """Code."""
    turn: int = 0
    attempt: int = 0
    tokens_per_s: float | None = None
    """Estimated from characters."""
    words: str | None = None
    """Its last words; None for viewers who may not see content."""
    cost: float | None = None
    usage: dict[str, Any] | None = None
    quiet_ms: int | None = None
    """For how long an open run has published nothing, if that is long."""


class AttemptView(msgspec.Struct, kw_only=True):
    """One call of a provider, as the run's events show it."""

    turn: int
    attempt: int
    provider: str | None
    model: str | None
    first_seq: int
    last_seq: int
    error: dict[str, Any] | None = None
    delay_ms: int | None = None
    """Wait before the next attempt."""
    continues: bool | None = None
    """Whether the next attempt continues its text."""
    usage: dict[str, Any] | None = None
    response_id: str | None = None


def state_after(event: public.PublicEvent) -> State | None:
    """The run's state after this event; None if the event does not determine it."""
    match event:
        case public.Completed():
            return "completed"
        case public.Incomplete():
            return "incomplete"
        case public.RunFailedEvent():
            return "failed"
        case public.Cancelled():
            return "cancelled"
        case public.Retrying() | public.Restarted():
            return "retrying"
        case public.ToolProgress():
            return "tool"
        case public.BlockComplete(kind="tool_call" | "tool_result") | public.BlockStarted(kind="tool_result"):
            return "tool"  # other calls may be open; once all have results, the next attempt begins
        case public.Started():
            return "first_byte"
        case public.Chunk() | public.BlockStarted() | public.BlockComplete():
            return _STATES_OF_KINDS.get(event.kind, "speaking")
        case _:
            return None


def end_of_text(events: Iterable[public.PublicEvent]) -> str:
    """The end of the visible text in these events, in order; the end of the thinking if there is no text."""
    chunks = [event for event in events if isinstance(event, public.Chunk)]
    visible = "".join(chunk.text for chunk in chunks if chunk.visible)
    text = visible or "".join(chunk.text for chunk in chunks if chunk.kind == "thinking")
    return _BLANKS.sub(" ", text)[-MAX_WORDS:]


def usage_shown(usage: Usage | None) -> dict[str, Any] | None:
    """Token counts without the provider's own object."""
    return msgspec.to_builtins(msgspec.structs.replace(usage, raw=None)) if usage else None


def attempts_of(events: Iterable[public.PublicEvent], *, content: bool) -> list[AttemptView]:
    """The attempts of a run, in order, from the first and the last events of each."""
    found: dict[tuple[int, int], AttemptView] = {}
    provider = model = None
    for event in events:
        if isinstance(event, public.Started):
            provider, model = event.provider, event.model
        attempt = found.setdefault(
            (event.turn, event.attempt),
            AttemptView(
                turn=event.turn,
                attempt=event.attempt,
                provider=provider,
                model=model,
                first_seq=event.seq,
                last_seq=event.seq,
            ),
        )
        attempt.last_seq = event.seq
        match event:
            case public.Retrying() | public.Restarted():
                attempt.error = _error(event.error, content=content)
                attempt.delay_ms = event.delay_ms
                if isinstance(event, public.Retrying):
                    attempt.continues = event.continues
                    if event.fallback:
                        provider, model = event.fallback.provider, event.fallback.model
            case public.UsageReported():
                attempt.usage = usage_shown(event.usage)
            case public.Answering():
                attempt.response_id = event.response_id
                attempt.model = event.model or attempt.model
            case public.RunFailedEvent() | public.Incomplete():
                attempt.error = _error(event.error, content=content) if event.error else None
            case _:
                pass
    return list(found.values())


def _error(error: ErrorInfo, *, content: bool) -> dict[str, Any]:
    return msgspec.to_builtins(error) if content else hidden_error(error)


class Costs:
    """The deployment's prices."""

    def __init__(self, settings: Settings) -> None:
        self._prices = PriceTable(settings.gateway.prices if settings.gateway else {})
        self._apis = {name: provider.api for name, provider in settings.providers.items()}

    def cost(self, usage: Usage | None, provider: str | None, models: list[str | None]) -> float | None:
        """The cost of this usage at the first of the models' names that has a price; None if none has one."""
        if usage is None or provider is None:
            return None
        name = self._prices.name_for([f"{provider}/{model}" for model in models if model])
        if name is None:
            return None
        counts = token_counts(usage, self._apis.get(provider, ""))
        prices = self._prices.nano_per_token(name)
        used = (counts.fresh, counts.cache_read, counts.cache_write, counts.output)
        return sum(n * price for n, price in zip(used, prices, strict=True)) / NANO


# A fetcher marks an entry of `turns` as not begun while the run waits there. So the queue itself distinguishes a
# waiting run from one whose provider is called, and no service writes extra data for the console.


GROUP = "fetcher"
MAX_ENTRIES = 2000
"""Entries of a partition to read at each look. Later entries count as begun."""
EARLY_MS = 5000
"""Entries are looked for from this long before their run was accepted: in a Cluster, two clocks gave the times."""
_MAX_REMEMBERED = 20_000
_Place: TypeAlias = tuple[int, bytes]
"""Partition and entry."""


class TurnQueue:
    """Looks at the queues of all partitions."""

    def __init__(self, server: Server, keys: Keys) -> None:
        self._server = server
        self._keys = keys
        self._entries: dict[_Place, Mapping[str, TurnWork]] = {}
        """Entries that were read before: an entry never changes."""

    async def waiting(self, accepted_ms: Mapping[str, int]) -> dict[str, TurnWork]:
        """Of these runs, by the time of their acceptance, those whose turn has not begun, with the turn.

        Raises redis-py's errors.
        """
        since: dict[int, int] = {}
        for run, at_ms in accepted_ms.items():
            p = self._keys.partition_of(run)
            since[p] = min(since.get(p, at_ms), at_ms)
        if not since:
            return {}
        pipe = self._server.client.pipeline(transaction=False)
        for p, at_ms in since.items():
            stream = self._keys.topic(p, "turns")
            pipe.xpending_range(stream, GROUP, min=max(0, at_ms - EARLY_MS), max="+", count=MAX_ENTRIES)
            pipe.xinfo_groups(stream)
        replies: list[Any] = await pipe.execute(raise_on_error=False)
        unbegun: list[_Place] = []
        unread: dict[int, bytes] = {}
        for n, p in enumerate(since):
            pending, groups = map(_listed, replies[2 * n : 2 * n + 2])
            unbegun += [(p, entry["message_id"]) for entry in pending if _waits(entry)]
            unread[p] = next((each["last-delivered-id"] for each in groups if each["name"] == GROUP.encode()), b"0")
        found = await self._read(unbegun, unread)
        return {run: work for works in found for run, work in works.items() if run in accepted_ms}

    async def _read(
        self, unbegun: list[tuple[int, bytes]], unread: Mapping[int, bytes]
    ) -> list[Mapping[str, TurnWork]]:
        """The turns of these entries, and of those behind the last one that a fetcher got."""
        if len(self._entries) > _MAX_REMEMBERED:
            self._entries = {}
        missing = [place for place in unbegun if place not in self._entries]
        pipe = self._server.client.pipeline(transaction=False)
        for p, entry in missing:
            pipe.xrange(self._keys.topic(p, "turns"), entry, entry)
        for p, last in unread.items():
            pipe.xrange(self._keys.topic(p, "turns"), f"({last.decode()}", "+", count=MAX_ENTRIES)
        replies: list[Any] = await pipe.execute(raise_on_error=False)
        for place, reply in zip(missing, replies, strict=False):
            self._entries[place] = _turns(reply)
        return [self._entries[place] for place in unbegun] + [_turns(reply) for reply in replies[len(missing) :]]


def _waits(entry: Mapping[str, Any]) -> bool:
    return entry["times_delivered"] == 0 or entry["consumer"] == NOBODY.encode()


def _turns(reply: Any) -> dict[str, TurnWork]:
    found: dict[str, TurnWork] = {}
    for _, fields in _listed(reply):
        for name, data in fields.items():
            try:
                found[name.decode()] = turn_decoder.decode(data)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue  # a poison entry, which its fetcher reports
    return found


def _listed(reply: Any) -> Iterable[Any]:
    """The answer; of a stream that is missing or may not be read, none. Raises the server's other errors."""
    if isinstance(reply, (ResponseError, NoPermissionError)):
        return ()
    if isinstance(reply, Exception):
        raise reply
    return cast("list[Any]", reply)
