"""Questions that calls ask. A call that asks ends there, and is run again from its start with the answer; one that
cannot do that waits in its worker, within its timeout.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Literal, Self, TypeAlias, cast

import msgspec

from tokenbus.errors import ToolFailure
from tokenbus.events.frames import GivenAnswer, ToolAsked
from tokenbus.events.waits import MAX_TIMEOUT_S
from tokenbus.tools import Answered
from tokenbus_services.json_schema import SchemaError, compile_schema
from tokenbus_services.tools.tool_call import KeptTask

MOST_QUESTIONS = 100
"""Of one call."""
MAX_TEXT_CHARS = 4000
MAX_SCHEMA_BYTES = 64 * 2**10
MAX_STATE_BYTES = 256 * 2**10
_encode = msgspec.json.Encoder(order="deterministic").encode


class Question(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    schema: dict[str, object] | None = None
    url: str | None = None
    timeout_s: float | None = None
    """How long it waits; None: as the tool's settings say."""
    state: str = ""
    """What the call gets back with the answer."""

    @property
    def id(self) -> str:
        """Names what is asked."""
        return hashlib.sha256(_encode((self.text, self.schema, self.url))).hexdigest()[:32]


Wait: TypeAlias = Callable[[Question], Coroutine[Any, Any, GivenAnswer]]
"""Asks, and returns the answer. Raises ToolFailure."""


class PutAway(BaseException):
    """Ends a call that has asked. It is no Exception, so that a tool does not take it for an error of its own."""


class Asking:
    """The questions of one call, numbered in the order in which it asks them. Callable from any thread."""

    def __init__(self, answers: list[GivenAnswer], wait: Wait | None = None) -> None:
        """``answers``: to the first questions. ``wait``: the call does not end when it asks, but waits for this."""
        self._answers = answers
        self._wait = wait
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self.ended: Question | str | None = None
        """Set once the call has ended: the question without an answer, or what was wrong with one."""

    async def ask(
        self,
        schema: Mapping[str, object] | None,
        text: str,
        *,
        url: str | None = None,
        timeout_s: float | None = None,
    ) -> Answered:
        """See `tokenbus.tools.Ask`."""
        given_schema = dict(schema) if schema is not None else None
        question = Question(text=text, schema=given_schema, url=url, timeout_s=timeout_s)
        if self._wait:
            asking = asyncio.run_coroutine_threadsafe(self._wait(question), self._loop)
            return answered(await asyncio.wrap_future(asking))
        if self.ended is None:
            number = next(self._numbers)
            try:
                asked = question.id
            except (TypeError, ValueError, RecursionError) as e:
                self.ended = f"question {number + 1} is not JSON: {e}"
                raise PutAway from None
            if number < len(self._answers):
                if self._answers[number].question == asked:
                    return answered(self._answers[number])
                self.ended = f"question {number + 1} is not the one that was answered, so the call cannot go on"
            elif self.ended is None:
                self.ended = question
        raise PutAway


Hold: TypeAlias = Callable[[ToolAsked], Awaitable[GivenAnswer]]
"""Submits a question of a call that waits in its worker, and returns the answer. Raises ToolFailure."""
HELD_SHARE = 0.9
"""How much of its remaining time a held call waits; the rest is for what it makes of the answer, or of none."""


class Holding:
    """The questions for which one call waits in its worker. Use as a context manager; they end with the block."""

    def __init__(self, ask: Callable[[Question, int], Awaitable[GivenAnswer]], task: KeptTask | None = None) -> None:
        """``ask`` asks a question, given how many the call has asked before."""
        self.task = task
        """Where the call keeps a task that outlives the worker; None: nowhere."""
        self._ask = ask
        self._numbers = itertools.count()
        self._asking: set[asyncio.Task[GivenAnswer]] = set()
        self._one = asyncio.Lock()

    async def ask(self, question: Question) -> GivenAnswer:
        """Return the answer; one question after the other is asked. Raises ToolFailure, also if the call ends first."""
        asking = asyncio.create_task(self._in_turn(question), name="tool question")
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        await asyncio.wait({asking})
        if asking.cancelled():
            raise ToolFailure("", "closed", "the call ended before the question was answered")
        return asking.result()

    def restart(self) -> None:
        """The call begins again, in this worker: what it asked before it asks again."""
        self._end()
        self._numbers = itertools.count()

    async def _in_turn(self, question: Question) -> GivenAnswer:
        async with self._one:
            return await self._ask(question, next(self._numbers))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def _end(self) -> None:
        for asking in self._asking:
            asking.cancel()


def answered(given: GivenAnswer) -> Answered:
    """The answer as a tool reads it."""
    decision = cast("Literal['accept', 'decline', 'cancel']", given.decision)
    content = msgspec.json.decode(given.content, type=dict[str, object]) if given.content else None
    if content is None and decision == "accept":
        content = {}
    return Answered(decision=decision, content=content, by=given.by, door=given.door)


def check(tool: str, question: Question, asked: int) -> None:
    """Raise ToolFailure if the question cannot be asked. ``asked``: how many the call has asked before."""
    if problem := _problem(question, asked):
        raise ToolFailure(tool, "bad_question", f"the tool asked a question that cannot be asked: {problem}")


def _problem(question: Question, asked: int) -> str | None:
    if asked >= MOST_QUESTIONS:
        return f"it is number {asked + 1}; a call may ask {MOST_QUESTIONS}"
    if not 0 < len(question.text) <= MAX_TEXT_CHARS:
        return f"its text must have 1 to {MAX_TEXT_CHARS} characters"
    if question.timeout_s is not None and not 0 < question.timeout_s <= MAX_TIMEOUT_S:
        return f"timeout_s must be above 0, and at most {MAX_TIMEOUT_S}"
    if len(question.state) > MAX_STATE_BYTES:
        return f"its state has {len(question.state)} characters; the limit is {MAX_STATE_BYTES}"
    if question.url is not None:
        if question.schema is not None:
            return "it has a schema or a url, not both"
        return None if question.url.startswith(("https://", "http://")) else "its url is not one of the web"
    if question.schema is None or question.schema.get("type") != "object":
        return "its schema must be that of an object"
    if len(_encode(question.schema)) > MAX_SCHEMA_BYTES:
        return f"its schema has more than {MAX_SCHEMA_BYTES} bytes"
    try:
        compile_schema(question.schema)
    except SchemaError as e:
        return f"schema: {e}"
    return None
