"""What an executor of Python tools does: one call at a time. `python -m …` is the tools' fork server."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress
from functools import partial

import msgspec

from tokenbus.bus import process_clock
from tokenbus.bus.liveness import stop_task
from tokenbus.errors import SettingsError, ToolFailure
from tokenbus.events.frames import GivenAnswer, ToolReported
from tokenbus.tools import Image
from tokenbus_services.executor import fork_server
from tokenbus_services.tools.progress import Reporter
from tokenbus_services.tools.python.function import ToolFunction
from tokenbus_services.tools.questions import Question
from tokenbus_services.tools.tool_call import Text, ToolCall, context_of

CLOSE_S = 3.0
"""How long a cancelled call may take to end."""


def prepare(work: bytes) -> fork_server.Serve:
    """Import the tools; return what an executor of them does. Raises SettingsError."""
    what = msgspec.msgpack.decode(work, type=PythonWork)
    functions: dict[str, ToolFunction] = {}
    for name, tool in what.tools.items():
        try:
            functions[name] = ToolFunction(name, tool.call, tool.parameters)
        except ValueError as e:
            raise SettingsError(what.source, f"tools.{name}.call", str(e)) from e

    async def serve(link: fork_server.Link) -> None:
        running: asyncio.Task[None] | None = None
        questions = _HeldQuestions(link)
        async for body in link.received():
            message: Call | Cancel | Given = to_executor.decode(body)
            if isinstance(message, Call):
                name = message.call.name
                waits = questions if what.tools[name].waits else None
                work = _run(link, functions[name], message, what.result_bytes, waits)
                running = asyncio.create_task(work, name=f"tool {name}")
            elif isinstance(message, Given):
                questions.answer(message)
            elif running:
                running.cancel()
        with suppress(TimeoutError):
            async with process_clock.timeout(CLOSE_S):
                await stop_task(running)

    return serve


class _HeldQuestions:
    """Questions for which calls wait here."""

    def __init__(self, link: fork_server.Link) -> None:
        self._link = link
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[GivenAnswer]] = {}

    async def ask(self, call: int, question: Question) -> GivenAnswer:
        """Ask the worker; return the answer. Raises ToolFailure."""
        number = next(self._ids)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._link.send(Holds(call, number, question))
        try:
            return await answer
        finally:
            del self._waiting[number]

    def answer(self, given: Given) -> None:
        """Pass on an answer."""
        answer = self._waiting.get(given.id)
        if answer is None or answer.done():
            return
        if given.answer is None:
            answer.set_exception(ToolFailure("", "bad_question", given.problem))
        else:
            answer.set_result(given.answer)


async def _run(
    link: fork_server.Link, function: ToolFunction, asked: Call, result_bytes: int, held: _HeldQuestions | None
) -> None:
    call, number = asked.call, asked.number
    wait = partial(held.ask, number) if held else None

    async def deliver(report: ToolReported) -> None:
        link.send(Reported(number, report.progress, report.total, report.message))

    try:
        with Reporter(call.block, deliver, str) as reporter:
            text = call.arguments
            arguments: dict[str, object]
            arguments = {"input": text} if call.free_text else msgspec.json.decode(text or "{}", type=dict[str, object])
            result = await function(call, arguments, context_of(call, asked.deadline, reporter.report), wait)
            if isinstance(result, Question):
                link.send(Asked(number, result))
            else:
                link.send(Returned(number, [_bounded(call.name, part, result_bytes) for part in result]))
    except MemoryError:
        link.out_of_memory()
    except ToolFailure as e:
        link.send(Failed(number, e.kind, _encoded(e.problem).decode()))
    except asyncio.CancelledError:
        link.send(Failed(number, "exception", "the tool cancelled itself"))


def _bounded(tool: str, part: Text | Image, most: int) -> Text | Shown:
    if isinstance(part, Text):
        return Text(_encoded(part.text)[:most].decode(errors="ignore"), part.media_type)
    if len(part.data) > most:
        raise ToolFailure(tool, "bad_result", f"an image of {len(part.data)} bytes; a blob may have {most}")
    return Shown(part.data, part.media_type)


def _encoded(text: str) -> bytes:
    """Lone surrogates cannot be encoded and become question marks."""
    return text.encode(errors="replace")


# Messages between a tool worker and its executors. An executor has one call at a time.


class PythonCall(msgspec.Struct, frozen=True):
    """What an executor needs of a `PythonTool`, whose settings would cost it half of its start."""

    call: str
    parameters: dict[str, object]
    waits: bool
    """Whether a call that asks waits for the answer."""


class PythonWork(msgspec.Struct, frozen=True, kw_only=True):
    """What executors of tools do."""

    tools: dict[str, PythonCall]
    source: str
    """Where the tools are declared."""
    result_bytes: int
    """Longer texts of a result are cut, and larger images refused."""


class Call(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    number: int
    """Messages with another number are about an earlier call."""
    call: ToolCall
    deadline: float


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Cancel the call."""


class Given(msgspec.Struct, frozen=True, array_like=True, tag="given"):
    """The answer to the question of this id."""

    id: int
    answer: GivenAnswer | None
    """None: there is none, because of the problem."""
    problem: str = ""


class Reported(msgspec.Struct, frozen=True, array_like=True, tag="reported"):
    """The tool reported progress."""

    number: int
    progress: float
    total: float | None
    message: str | None


class Shown(msgspec.Struct, frozen=True, tag=True):
    """An image of a result."""

    data: bytes
    media_type: str


class Returned(msgspec.Struct, frozen=True, array_like=True, tag="returned"):
    number: int
    parts: list[Text | Shown]


class Asked(msgspec.Struct, frozen=True, array_like=True, tag="asked"):
    """The call has ended with a question."""

    number: int
    question: Question


class Holds(msgspec.Struct, frozen=True, array_like=True, tag="holds"):
    """The call asks, and waits for `Given`."""

    number: int
    id: int
    question: Question


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The call failed, as `ToolFailure` says."""

    number: int
    kind: str
    problem: str


to_executor = msgspec.msgpack.Decoder(Call | Cancel | Given)
from_executor = msgspec.msgpack.Decoder(Reported | Holds | Returned | Asked | Failed)
