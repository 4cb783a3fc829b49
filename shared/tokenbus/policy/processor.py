"""The policy interface: `StreamProcessor`, and the context in which it works on one stream.

A policy is told of every chunk, and what it does not send does not go out: holding is doing nothing. ::

    class NoShouting(StreamProcessor):
        async def on_chunk(self, chunk, state, context):
            said = isinstance(state.chunk_block, ContentStreamBlock)
            await context.send(context.with_text(chunk, context.text(chunk).lower()) if said else chunk)
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NamedTuple, Protocol, Self, TypeAlias, TypeVar

import msgspec

from tokenbus.errors import SettingsError
from tokenbus.policy.stream_state import StreamBlock, StreamState

if TYPE_CHECKING:
    from tokenbus.client.client import Client

C = TypeVar("C")
"""The kind of chunk: a public event, or an OpenAI-style chunk in any of its forms."""

Action = Literal["block", "replace", "terminate", "error"]


class NewText(msgspec.Struct, frozen=True):
    """Sent in place of a chunk: a text of the policy's own, as a block of its own. Empty: nothing."""

    text: str


class NewToolCall(msgspec.Struct, frozen=True):
    """Sent in place of a chunk: a whole tool call of the policy's own, or another's that it changed."""

    id: str
    name: str
    arguments: str
    """The raw string."""


class Decision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a policy did with a block or with the stream, for the record."""

    policy: str
    action: Action
    reason: str = ""
    block: int | None = None
    """The block's number as this policy saw it."""
    tool_id: str | None = None
    tool_name: str | None = None
    original: str | None = None
    """The block's content or raw arguments as they came."""
    final: str | None = None
    """What went out in its place; None: nothing."""


class ChunkAccess(Protocol[C]):
    """What the chunks of a kind of stream have to say for a policy that works on text."""

    def text(self, chunk: C) -> str:
        """What the chunk adds to the content of its block, or to the arguments of its call; often empty."""
        ...

    def with_text(self, chunk: C, text: str) -> C:
        """The same chunk with another text in that place. The chunk itself is not changed."""
        ...

    def key(self, chunk: C) -> int:
        """Which chunk of its stream this is, while it is kept."""
        ...

    def is_chunk(self, sent: object) -> bool:
        """Whether this may go out on such a stream."""
        ...

    def is_end(self, chunk: C) -> bool:
        """Whether the chunk says why the stream ends: what is said after it comes too late."""
        ...

    def is_metadata(self, chunk: C) -> bool:
        """Whether the chunk says nothing of the answer itself, as usage does, so that it may follow the end."""
        ...


class StreamContext(Generic[C]):
    """One stream under one policy: where it sends to. It collects, and the stream's runner takes."""

    def __init__(self, run: str, policy: str, words: ChunkAccess[C], client: Client | None = None) -> None:
        self.run = run
        """The run's id on the bus; elsewhere whatever its caller named the stream."""
        self.policy = policy
        self.client = client
        """To ask the bus with, where there is one."""
        self.terminated = False
        self._words = words
        self._sent: list[C | NewText | NewToolCall] = []
        self._later: list[Deferred[C]] = []
        self._decisions: list[Decision] = []
        self._dealt_with: list[int] = []

    def send(self, chunk: C | NewText | NewToolCall | str) -> Awaitable[None]:
        """Let a chunk out: this one, one that was held, a changed copy, or something new; a string as `NewText`.

        After `terminate`: nothing. It is out when this returns, awaited or not. Indices, block boundaries, whole
        contents and the finish reason are put right on the way out. Raises TypeError for what is none of these.
        """
        if not self.terminated:
            self._sent.append(sendable(self._words, chunk))
        return _DONE

    def terminate(self, reason: str = "") -> None:
        """End the stream after what was sent. It is not called again; the source is told to stop.

        Its finish reason is ``content_filter``, unless one was sent. What is still with `later` is dropped.
        """
        if not self.terminated:
            self.terminated = True
            self._decisions.append(Decision(policy=self.policy, action="terminate", reason=reason))

    def later(self, work: Awaitable[Iterable[C | NewText | NewToolCall | str]], *, holding: Iterable[C] = ()) -> None:
        """Send what ``work`` gives, as soon as it is known and in the order of the calls of `later`.

        The stream goes on meanwhile, and several works run side by side; but a finish reason, a turn's end and
        everything else that is not content waits for them all. ``holding``: the chunks that the work is about, which
        go out where it fails and the policy's ``on_error`` is pass. What a coroutine has `decided` is told with what it
        gives.
        """
        self._later.append(Deferred(work, list(holding)))

    def decided(self, action: Action, block: StreamBlock, *, reason: str = "", final: str | None = None) -> None:
        """Say what became of a block, for the record. What was blocked never goes out when the policy fails later."""
        content = block.text
        call = block.kind == "tool_call"
        name = getattr(block, "name", None)
        context, decisions = _putting_off.get()
        (decisions if context is self else self._decisions).append(
            Decision(
                policy=self.policy,
                action=action,
                reason=reason,
                block=block.number,
                tool_id=block.id if call else None,
                tool_name=name if call else None,
                original=content,
                final=final,
            )
        )

    def text(self, chunk: C) -> str:
        """See `Words.text`."""
        return self._words.text(chunk)

    def with_text(self, chunk: C, text: str) -> C:
        """See `Words.with_text`. The chunk counts as dealt with, as one that was sent does."""
        self._dealt_with.append(self._words.key(chunk))
        return self._words.with_text(chunk, text)

    @contextmanager
    def putting_off(self, decisions: list[Decision]) -> Generator[None]:
        """For the runner: what is decided in here goes into this list, for it is told with what the work gives."""
        token = _putting_off.set((self, decisions))
        try:
            yield
        finally:
            _putting_off.reset(token)

    def take(self) -> CallOutcome[C]:
        """For the runner: what the policy did since it last asked."""
        for item in self._sent:
            if not isinstance(item, NewText | NewToolCall):
                self._dealt_with.append(self._words.key(item))
        for work in self._later:
            self._dealt_with += [self._words.key(chunk) for chunk in work.holding]
        taken = CallOutcome(self._sent, self._later, self._decisions, self._dealt_with)
        self._sent, self._later, self._decisions, self._dealt_with = [], [], [], []
        return taken


_putting_off: ContextVar[tuple[StreamContext[Any] | None, list[Decision]]] = ContextVar(
    "putting_off", default=(None, [])
)
"""Where work that was put off decides, and on which stream."""


class CallOutcome(NamedTuple, Generic[C]):
    """What a policy did in one call."""

    sent: list[C | NewText | NewToolCall]
    later: list[Deferred[C]]
    decisions: list[Decision]
    dealt_with: list[int]
    """Keys of the chunks that it sent, rewrote or put off."""


class Deferred(Generic[C]):
    """Something that is still being found out."""

    def __init__(self, work: Awaitable[Iterable[C | NewText | NewToolCall | str]], holding: list[C]) -> None:
        self.work = work
        self.holding = holding


class _Done:
    """An awaitable that is done: a policy that forgets to await `send` has sent all the same."""

    def __await__(self) -> Generator[None, None, None]:
        return
        yield


_DONE = _Done()


def sendable(words: ChunkAccess[C], sent: C | NewText | NewToolCall | str) -> C | NewText | NewToolCall:
    """What a policy sent, as it goes out. Raises TypeError for what cannot."""
    if isinstance(sent, str):
        return NewText(sent)
    if isinstance(sent, NewText | NewToolCall) or words.is_chunk(sent):
        return sent
    raise TypeError(
        f"a policy sent a {type(sent).__name__}: send a chunk of the stream, a text, NewText or NewToolCall"
    )


class NoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a policy without options."""


class StreamProcessor:
    """A policy on one stream. One instance lives as long as its stream: what it keeps is that stream's alone.

    Calls come one after the other. What it raises, and a call that takes longer than its timeout, is an error of the
    policy: the stream ends there (``on_error = "block"``) or goes on without it (``"pass"``).
    """

    Options: ClassVar[type[msgspec.Struct]] = NoOptions
    """The type of its options, decoded strictly from the settings."""

    def __init__(self, options: Any = None) -> None:
        """``options``: of the type `Options`; None: all as they are by themselves."""
        self.options: Any = self.Options() if options is None else options

    @classmethod
    def from_options(cls, options: Mapping[str, object]) -> Self:
        """A new instance. Raises SettingsError, which names the option, where one is wrong or unknown."""
        try:
            return cls(msgspec.convert(dict(options), cls.Options))
        except (msgspec.ValidationError, ValueError) as e:
            raise SettingsError(f"policy {cls.__module__}:{cls.__qualname__}", "options", str(e)) from e

    async def on_chunk(self, chunk: Any, state: StreamState, context: StreamContext[Any]) -> None:
        """One chunk, already worked into ``state``. As it stands here: it is let through."""
        await context.send(chunk)

    async def on_end(self, state: StreamState, context: StreamContext[Any]) -> None:
        """The source ended, soundly or not (``state.finish_reason`` is None then); not called after `terminate`.

        The place to let out what is still held, or to close what the policy opened. What it sends goes out before the
        finish reason or the terminal event, which waits for it.
        """


Function: TypeAlias = Callable[[Any, StreamState, StreamContext[Any]], Awaitable[None]]
"""A policy in its shortest form: `StreamProcessor.on_chunk` as a function."""


class FunctionPolicy(StreamProcessor):
    """A policy of one function. What it keeps outside is shared by all streams."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self._function = function

    async def on_chunk(self, chunk: Any, state: StreamState, context: StreamContext[Any]) -> None:
        await self._function(chunk, state, context)
