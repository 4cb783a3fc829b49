"""The policy interface: `StreamProcessor`, and the context in which it works on one stream.

A policy is called with every chunk. A chunk that it does not send does not go out, so doing nothing holds it. ::

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
from tokenbus.policy.stream_state import ContentStreamBlock, StreamBlock, StreamState, ToolCallStreamBlock

if TYPE_CHECKING:
    from tokenbus.client.client import Client

C = TypeVar("C")
"""The chunk type: a public event, or an OpenAI-style chunk in any form."""

Action = Literal["block", "replace", "terminate", "error"]


class NewText(msgspec.Struct, frozen=True):
    """New text, sent in place of a chunk as a separate block. Empty: nothing is sent."""

    text: str


class NewToolCall(msgspec.Struct, frozen=True):
    """A complete tool call, sent in place of a chunk: a new one or a changed one."""

    id: str
    name: str
    arguments: str
    """The raw string."""


class Decision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a policy did to a block or to the stream, for the record."""

    policy: str
    action: Action
    reason: str = ""
    block: int | None = None
    """The block's number as this policy saw it."""
    tool_id: str | None = None
    tool_name: str | None = None
    original: str | None = None
    """The block's content or raw arguments as received."""
    final: str | None = None
    """What went out in its place; None: nothing."""


class ChunkAccess(Protocol[C]):
    """How to read and change the text of a stream format's chunks."""

    def text(self, chunk: C) -> str:
        """Text that the chunk adds to its block's content or its call's arguments; often empty."""
        ...

    def with_text(self, chunk: C, text: str) -> C:
        """Return a copy of the chunk with this text instead. The chunk itself is not changed."""
        ...

    def with_data(self, chunk: C, rewrite: Callable[[str], str]) -> C:
        """Return a copy of the chunk whose data beside the content (citations, say) were rewritten. The data are JSON
        texts; one that is no JSON afterwards is left out.
        """
        ...

    def key(self, chunk: C) -> int:
        """Return a key that identifies the chunk within its stream, for as long as the chunk is kept."""
        ...

    def is_chunk(self, sent: object) -> bool:
        """Whether this may be sent on such a stream."""
        ...

    def is_end(self, chunk: C) -> bool:
        """Whether the chunk carries the reason why the stream ends; content after it would be too late."""
        ...

    def is_metadata(self, chunk: C) -> bool:
        """Whether the chunk has no content, like usage, and so may follow the end."""
        ...


class StreamContext(Generic[C]):
    """One stream under one policy. Collects what the policy sends; the stream's runner takes it."""

    def __init__(self, run: str, policy: str, words: ChunkAccess[C], client: Client | None = None) -> None:
        self.run = run
        """The run's id on the bus; elsewhere the caller's name for the stream."""
        self.policy = policy
        self.client = client
        """A client for the bus, if there is one."""
        self.terminated = False
        self._words = words
        self._sent: list[C | NewText | NewToolCall] = []
        self._later: list[Deferred[C]] = []
        self._decisions: list[Decision] = []
        self._dealt_with: list[int] = []

    def send(self, chunk: C | NewText | NewToolCall | StreamBlock | str) -> Awaitable[None]:
        """Send a chunk: the current one, a held one, a changed copy, or something new. A string is sent as `NewText`; a
        `ContentStreamBlock` or `ToolCallStreamBlock` as a new block with what it has by now.

        Does nothing after `terminate`. The chunk is sent when this returns, whether or not it is awaited. Indices,
        block boundaries, complete contents and the finish reason are corrected on output. Raises TypeError for anything
        else.
        """
        if not self.terminated:
            self._sent.append(sendable(self._words, chunk))
        return _DONE

    def terminate(self, reason: str = "") -> None:
        """End the stream after what was sent. The policy is not called again, and the source is stopped.

        The finish reason is ``content_filter``, unless one was sent. Unfinished `later` work is dropped.
        """
        if not self.terminated:
            self.terminated = True
            self._decisions.append(Decision(policy=self.policy, action="terminate", reason=reason))

    def later(self, work: Awaitable[Iterable[C | NewText | NewToolCall | str]], *, holding: Iterable[C] = ()) -> None:
        """Send the result of ``work`` when it is ready, in the order of the `later` calls.

        The stream continues meanwhile, and several work items run concurrently. But a finish reason, a turn's end and
        everything else that is not content waits for all of them. ``holding``: the chunks that the work is about; they
        go out if it fails and the policy's ``on_error`` is ``pass``. Decisions that a coroutine makes with `decided`
        are reported together with its result.
        """
        self._later.append(Deferred(work, list(holding)))

    def decided(self, action: Action, block: StreamBlock, *, reason: str = "", final: str | None = None) -> None:
        """Record the decision on a block. A blocked block never goes out, even if the policy fails later."""
        content = block.text
        call = block.kind in ("tool_call", "server_tool")
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
        """Return the text of a chunk; empty if it has none."""
        return self._words.text(chunk)

    def with_text(self, chunk: C, text: str) -> C:
        """Return a copy of a chunk with another text. The chunk counts as handled, as if it were sent."""
        self._dealt_with.append(self._words.key(chunk))
        return self._words.with_text(chunk, text)

    def with_data(self, chunk: C, rewrite: Callable[[str], str]) -> C:
        """Return a copy of a chunk whose data beside the content (citations, say) were rewritten. They are JSON texts;
        one that is no JSON afterwards is left out. The chunk counts as handled, as if it were sent.
        """
        self._dealt_with.append(self._words.key(chunk))
        return self._words.with_data(chunk, rewrite)

    @contextmanager
    def putting_off(self, decisions: list[Decision]) -> Generator[None]:
        """For the runner: collect the decisions made in this ``with`` block in ``decisions``.

        They are reported together with the result of the work.
        """
        token = _putting_off.set((self, decisions))
        try:
            yield
        finally:
            _putting_off.reset(token)

    def take(self) -> CallOutcome[C]:
        """For the runner: return and clear what the policy did since the last call."""
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
"""The stream whose deferred work is running, and the list for its decisions."""


class CallOutcome(NamedTuple, Generic[C]):
    """What a policy did in one call."""

    sent: list[C | NewText | NewToolCall]
    later: list[Deferred[C]]
    decisions: list[Decision]
    dealt_with: list[int]
    """Keys of the chunks that it sent, rewrote or deferred."""


class Deferred(Generic[C]):
    """Deferred work, not started yet."""

    def __init__(self, work: Awaitable[Iterable[C | NewText | NewToolCall | str]], holding: list[C]) -> None:
        self.work = work
        self.holding = holding


class _Done:
    """A finished awaitable, so that `send` works even if the policy forgets to await it."""

    def __await__(self) -> Generator[None, None, None]:
        return
        yield


_DONE = _Done()


def sendable(words: ChunkAccess[C], sent: C | NewText | NewToolCall | StreamBlock | str) -> C | NewText | NewToolCall:
    """Convert what a policy sent into its output form; a block of the state is sent as a new block like it. Raises
    TypeError, which says what to send, if it cannot be sent.
    """
    if isinstance(sent, str):
        return NewText(sent)
    if isinstance(sent, ContentStreamBlock):
        return NewText(sent.content)
    if isinstance(sent, ToolCallStreamBlock):
        return NewToolCall(sent.id, sent.name, sent.arguments)
    if isinstance(sent, StreamBlock):
        raise TypeError(
            f"a policy sent a {type(sent).__name__}: send the chunks of a block of kind {sent.kind}, changed with "
            "`context.with_text` if need be; only a text or a tool call can be sent as a block"
        )
    if isinstance(sent, NewText | NewToolCall) or words.is_chunk(sent):
        return sent
    raise TypeError(
        f"a policy sent a {type(sent).__name__}: send a chunk of the stream, a text, NewText or NewToolCall"
    )


class NoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of a policy without options."""


CONSTRUCTOR = "a policy is made with its options as the only argument: `def __init__(self, options=None)`"


class StreamProcessor:
    """A policy on one stream. One instance per stream, so its attributes are private to that stream.

    Calls never overlap. An exception or a timeout is an error of the policy: the stream ends there (``on_error =
    "block"``) or continues without it (``"pass"``).
    """

    Options: ClassVar[type[msgspec.Struct]] = NoOptions
    """The type of its options, decoded strictly from the settings."""

    def __init__(self, options: Any = None) -> None:
        """``options``: an instance of `Options`; None for the defaults."""
        self.options: Any = self.Options() if options is None else options

    @classmethod
    def from_options(cls, options: Mapping[str, object]) -> Self:
        """Create an instance. Raises SettingsError, naming the option, if one is invalid or unknown."""
        policy = f"policy {cls.__module__}:{cls.__qualname__}"
        try:
            return cls(msgspec.convert(dict(options), cls.Options))
        except (msgspec.ValidationError, ValueError) as e:
            known = ", ".join(sorted(cls.Options.__struct_encode_fields__)) or "none"
            raise SettingsError(policy, "options", f"{e}. Known options: {known}") from e
        except (Exception, SystemExit) as e:
            raise SettingsError(policy, "constructor", f"it raised {type(e).__name__}: {e}; {CONSTRUCTOR}") from e

    async def on_chunk(self, chunk: Any, state: StreamState, context: StreamContext[Any]) -> None:
        """Handle one chunk; ``state`` includes it already. The default sends it."""
        await context.send(chunk)

    async def on_end(self, state: StreamState, context: StreamContext[Any]) -> None:
        """Handle the end of the source, normal or not (then ``state.finish_reason`` is None).

        Not called after `terminate`. Send held chunks here, or close what the policy opened. What it sends goes out
        before the finish reason or the terminal event, which waits for it.
        """


Function: TypeAlias = Callable[[Any, StreamState, StreamContext[Any]], Awaitable[None]]
"""A policy in its shortest form: `StreamProcessor.on_chunk` as a function."""


class FunctionPolicy(StreamProcessor):
    """A policy made from a function. State outside the function is shared by all streams."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self._function = function

    async def on_chunk(self, chunk: Any, state: StreamState, context: StreamContext[Any]) -> None:
        await self._function(chunk, state, context)
