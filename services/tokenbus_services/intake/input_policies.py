"""What policies judge before a provider gets it: the texts of a request, of what is appended to a session, and of what
a run waits for.

::

    texts ──> a run of their own: no provider, its answer is the texts ──> drafts ──> policy stage ──> verdicts
                                                                                                         │
    the request, or the append, with the texts that were released <── intake reads the ended run <───────┘

So policies judge input with all that holds for output: executors, timeouts, `on_error`, decisions, fail-over. The run's
id is made of what is judged. So whichever intake worker takes the request, and however often, there is one verdict.
"""

from __future__ import annotations

import asyncio
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, TypeVar, cast

import msgspec

from tokenbus.bus.keys import Keys
from tokenbus.bus.layout import locate
from tokenbus.bus.liveness import beat
from tokenbus.bus.run_record import STATUS, UNENDED, status_of
from tokenbus.bus.server.retry import retry_until_available
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus.bus.server.stream_reader import Entry
from tokenbus.client.decode import is_end, public_event
from tokenbus.core.request.bounds import tenant_of
from tokenbus.core.run.termination import TERMINATED
from tokenbus.errors import InputRejected
from tokenbus.events import normalized as n
from tokenbus.events.frames import PolicyPlan
from tokenbus.events.public import BlockComplete, BlockStarted, Completed, Incomplete, PublicEvent, RunFailedEvent
from tokenbus_services.intake.run_creation import RunCreation

JUDGES = "judges"
"""Field of the run's hash: intake made the run, and no client."""
PIECE_CHARS = 16 * 1024
"""Characters of a text that policies get at once."""
FIRST_LOOK_S, LONGEST_LOOK_S = 0.005, 0.2
_COUNT = 256
_READABLE = ("fields", "extra_content", "reasoning_details", "citations")
"""Data of a part that its provider gets back and that are JSON: a client may write into them what it wants."""
T = TypeVar("T")
Json = dict[str, Any]


class Unjudged(Exception):
    """The verdict is not there yet: ``run`` is under way. ``of``: the run or the session that waits for it."""

    def __init__(self, run: str, of: str) -> None:
        super().__init__(f"policies judge it in run {run}")
        self.run = run
        self.of = of


class _Known(msgspec.Struct, frozen=True):
    """A run in which policies judge, as it was read."""

    status: str | None
    ours: bool
    """Intake made it, and no client."""
    log: str


class InputPolicies:
    """Has texts judged. Call it again once `ended` returns."""

    def __init__(self, server: Server, keys: Keys, creation: RunCreation) -> None:
        self._server = server
        self._keys = keys
        self._creation = creation

    async def judged(
        self, value: T, plan: PolicyPlan, name: str, *, of: Mapping[str, str], metadata: Json | None
    ) -> tuple[T, str | None]:
        """Return the struct with its texts as the policies released them, and the run in which they did; the same
        without a run if it has no texts.

        ``name``: the run or the append that it belongs to. ``of``: the run or the session, for the judging run's
        metadata; of ``metadata`` it only has the tenant. Raises Unjudged; InputRejected.
        """
        body = cast("Json", msgspec.to_builtins(value))
        texts = list(texts_in(body))
        if not texts:
            return value, None
        what = [name, dict(of), plan.names, *((text.role, text.text) for text in texts)]
        run = f"input-{sha256(msgspec.json.encode(what)).hexdigest()[:40]}"
        released = await self._released(run, plan, texts, of, metadata)
        changed = False
        for text, now in zip(texts, released, strict=True):
            if now != text.text:
                changed = True
                try:
                    text.put(now)
                except ValueError:
                    raise InputRejected(run, f"a policy changed the {text.role} to what cannot be read") from None
        return (msgspec.convert(body, type(value)) if changed else value), run

    async def ended(self, run: str) -> None:
        """Wait until the run has ended: the parser ends it if no policy worker answers."""
        look_s = FIRST_LOOK_S
        while (await self._known(run)).status in UNENDED:
            await asyncio.sleep(look_s)
            beat()
            look_s = min(2 * look_s, LONGEST_LOOK_S)

    async def _known(self, run: str) -> _Known:
        server = self._server
        await retry_until_available(
            server, lambda: locate(server, self._keys, run), what="look-up of a run's partition"
        )
        at = self._keys.within(self._keys.partition_of(run))  # the number of partitions may change meanwhile
        found: list[bytes | None] = await retry_until_available(
            server, lambda: server.client.hmget(at.run(run), [STATUS, JUDGES]), what="look-up of what is judged"
        )
        return _Known(status_of(found[0]), found[1] is not None, at.log(run))

    async def _released(
        self, run: str, plan: PolicyPlan, texts: Sequence[Text], of: Mapping[str, str], metadata: Json | None
    ) -> list[str]:
        unjudged = Unjudged(run, f"{tenant_of(metadata)} {next(iter(of.values()))}")
        known = await self._known(run)
        if known.status in (None, "awaited"):
            about: Json = {"judges_input_of": dict(of)}
            if tenant := tenant_of(metadata):
                about["tenant"] = tenant
            call = self._creation.judging(run, plan, _as_answer(texts), about, mark=JUDGES)
            await retry_until_available(
                self._server, lambda: run_script(self._server, call), what="input for policies to judge"
            )
            raise unjudged
        if not known.ours:
            raise InputRejected(run, f"there is another run {run}")
        if known.status in UNENDED:
            raise unjudged
        blocks, end = await retry_until_available(
            self._server, lambda: self._log(known.log), what="verdict on what goes in"
        )
        if end is None:  # a full server forgets ended runs
            raise InputRejected(run, "the verdict on it is gone", retryable=True)
        if not isinstance(end, Completed):
            error = end.error if isinstance(end, Incomplete | RunFailedEvent) else None
            problem = error.message if error else "its policies were stopped before they had judged it"
            if error and error.code == TERMINATED:
                problem = f"rejected by a policy: {error.message.partition(': ')[2] or 'it gave no reason'}"
            raise InputRejected(run, problem, retryable=bool(error and error.retryable))
        found = _by_text(blocks, len(texts))
        if found is None:
            raise InputRejected(run, "a policy withheld a text of it")
        return found

    async def _log(self, log: str) -> tuple[list[tuple[str, str]], PublicEvent | None]:
        """The released blocks, phase and content, and the run's end."""
        phases: dict[int, str] = {}
        blocks: dict[int, str] = {}
        after, end = "0-0", None
        while end is None:
            entries: list[Entry] = await self._server.client.xrange(log, f"({after}", count=_COUNT)
            if not entries:
                break
            for entry in entries:
                event = public_event(log, entry)
                if isinstance(event, BlockStarted):
                    phases[event.block] = event.phase or ""
                elif isinstance(event, BlockComplete):
                    blocks[event.block] = event.content or ""
                elif is_end(event):
                    end = event
            after = entries[-1][0].decode()
        return [(phases.get(number, ""), blocks[number]) for number in sorted(blocks)], end


def _as_answer(texts: Sequence[Text]) -> list[n.Normalized]:
    """The texts as the events of an answer: each is a block, whose phase names its role and its number."""
    events: list[n.Normalized] = []
    for i, text in enumerate(texts):
        events.append(n.BlockStart(i, "text", phase=f"{text.role} {i}"))
        pieces = (text.text[at : at + PIECE_CHARS] for at in range(0, len(text.text), PIECE_CHARS))
        events += (n.TextDelta(i, piece) for piece in pieces)
        events.append(n.BlockStop(i))
    return [*events, n.Done("stop")]


def _by_text(blocks: Sequence[tuple[str, str]], count: int) -> list[str] | None:
    """What was released of each text, given the phase and content of the blocks. None: one was withheld.

    A block that a policy made stands for a text that was withheld at this place, or else belongs to the text before it.
    """
    marked: list[int | None] = []
    for phase, _ in blocks:
        number = phase.rpartition(" ")[2]
        marked.append(int(number) if number.isdigit() else None)
    present = {number for number in marked if number is not None}
    released: dict[int, str] = {}
    last = -1
    for number, (_, content) in zip(marked, blocks, strict=True):
        if number is not None:
            last = number
        elif last < 0 or not (last + 1 in present or last + 1 == count):
            last += 1
        released[last] = released.get(last, "") + content
    return [released[i] for i in range(count)] if len(released) == count else None


# The texts of a request, of a message of a session, of a history and of a decision, all as JSON: system prompts,
# messages with their parts, what is added to the provider's body, and answers. Objects that a provider reads, such as
# schemas and data that it wants back, are texts as JSON. Media are no texts, except for documents of plain text.


class Text(msgspec.Struct, frozen=True):
    """A text, and how to replace it. ``put`` raises ValueError for what cannot stand there."""

    role: str
    text: str
    put: Callable[[str], None]


def texts_in(body: Json) -> Iterator[Text]:
    """Yield every text that is not empty, in order."""
    for text in _texts_in(body):
        if text.text:
            yield text


def _texts_in(body: Json) -> Iterator[Text]:
    if "decision_id" in body:
        for field in ("reason", "arguments", "content"):
            if isinstance(body.get(field), str):
                yield _member(body, field, "tool")
            elif body.get(field):
                yield _json(body, field, "tool")
        return
    yield from _options(body)
    yield from _options(body.get("request", {}))
    yield from _message(body)
    for message in body.get("messages", ()):
        yield from _message(message)


def _options(request: Json) -> Iterator[Text]:
    yield from _content(request, "system", "system")
    yield from _members(request.get("prefill") or {}, "system", "first_user_message")
    for tool in request.get("tools", ()):
        yield from _members(tool, "tool", "description")
        yield from _jsons(tool, "tool", "parameters", "format")
        yield from _jsons(tool, "extra", "extra")
    yield from _jsons(request, "format", "output_schema")
    for fallback in (request, *(request.get("fallback") or ())):
        yield from _jsons(fallback, "extra", "extra")


def _message(message: Json) -> Iterator[Text]:
    if "content" not in message:
        return
    yield from _content(message, "content", message.get("role", "user"))
    if message.get("participant"):
        yield _member(message, "participant", "name")
    yield from _jsons(message, "extra", "extra")


def _content(of: Json, field: str, role: str) -> Iterator[Text]:
    content = of.get(field)
    if isinstance(content, str):
        yield _member(of, field, role)
    for part in cast("list[Json]", content) if isinstance(content, list) else ():
        yield from _part(part, role)


def _part(part: Json, role: str) -> Iterator[Text]:
    match part.get("type"):
        case "tool_result":
            yield from _content(part, "content", "tool")
        case "document":
            yield from _members(part, role, "title", "context")
            source = part.get("source", {})
            if source.get("type") == "base64" and source.get("media_type", "").startswith("text/"):
                yield from _document(source, role)
        case _:
            yield from _members(part, role, "text", "arguments", "json")
    yield from _jsons(part, "extra", "extra")
    opaque: Json = part.get("opaque") or {}
    yield from (_json_text(opaque, field) for field in _READABLE if opaque.get(field))


def _members(of: Json, role: str, *fields: str) -> Iterator[Text]:
    for field in fields:
        if isinstance(of.get(field), str):
            yield _member(of, field, role)


def _member(of: Json, field: str, role: str) -> Text:
    def put(text: str) -> None:
        of[field] = text
        for name in ("signature", "opaque", "opaque_blobs"):  # of the text that was there
            of.pop(name, None)

    return Text(role, of[field], put)


def _jsons(of: Json, role: str, *fields: str) -> Iterator[Text]:
    yield from (_json(of, field, role) for field in fields if of.get(field))


def _json_text(of: Json, field: str) -> Text:
    """A text that is JSON already, and stays so."""

    def put(text: str) -> None:
        msgspec.json.decode(text)  # its error is a ValueError
        of[field] = text

    return Text("extra", of[field], put)


def _json(of: Json, field: str, role: str) -> Text:
    kind = cast("type[object]", type(of[field]))

    def put(text: str) -> None:
        of[field] = msgspec.json.decode(text, type=kind)  # its error is a ValueError

    return Text(role, msgspec.json.encode(of[field]).decode(), put)


def _document(source: Json, role: str) -> Iterator[Text]:
    def put(text: str) -> None:
        source["data"] = b64encode(text.encode()).decode()

    try:
        text = b64decode(source["data"]).decode(errors="replace")
    except ValueError:  # validation refuses it
        return
    yield Text(role, text, put)
