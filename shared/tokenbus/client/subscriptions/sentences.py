"""Visible text as sentences, for speech: a view of the topic `visible`.

Sentences are not a topic of their own, because where a sentence ends depends on the speaker: the language, the shortest
and longest usable sentence, and how long it may wait. A stored topic would also cost the server a third copy of each
text.

`visible` does not carry the end of a block. If a text stops growing for a moment, its run's log is checked for it. So
the last sentence comes as soon as its block is complete, and a pause in mid-sentence does not cut a word.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Literal, cast

import msgspec

from tokenbus.bus.keys import DATA_FIELD, Keys
from tokenbus.bus.layout import locate
from tokenbus.bus.server.server import translated
from tokenbus.bus.server.stream_reader import Entry
from tokenbus.client.decode import public_event
from tokenbus.client.deployment import Deployment
from tokenbus.client.subscriptions.ack_tracker import each
from tokenbus.client.subscriptions.cursor import Cursor, EnteredOrIterated, Gaps, until_stopped
from tokenbus.client.subscriptions.group import SharedSubscription, guarded
from tokenbus.client.subscriptions.ordered import OrderedSubscription
from tokenbus.errors import Malformed, ServerUnavailable
from tokenbus.events import public
from tokenbus.shaping.sentences import SentenceRules, Sentences

LOOK_S = 0.05
"""Look at the run's log after a text has not grown for this long; then after twice as long each time."""
LONGEST_LOOK_S = 2.0


class Sentence(msgspec.Struct, frozen=True, kw_only=True):
    """A sentence of a block's visible text."""

    run: str
    turn: int
    attempt: int
    block: int
    text: str
    """Includes trailing whitespace: a block's sentences concatenate to its visible text."""
    first: int
    """Seq of the chunk with its first character."""
    last: int
    """Seq of the chunk with its last character: use as ``heard_through`` for a cancel after it was spoken."""

    @property
    def seq(self) -> int:
        """The same as ``last``."""
        return self.last


class BlockSentences:
    """The undelivered text of one block, and the chunks it came in."""

    def __init__(self, rules: SentenceRules, chunk: public.Chunk) -> None:
        self.run, self.block = chunk.run, chunk.block
        self.attempt, self.seq = chunk.attempt, -1
        self.since = 0.0
        """When the oldest held text arrived."""
        self.look_at = 0.0
        self._text = Sentences(rules)
        self._pause_s = LOOK_S
        self._pieces: deque[tuple[int, public.Chunk]] = deque()
        """Chunks not fully delivered, each with its end offset in the block."""
        self._received = 0
        self._delivered = 0

    def add(self, chunk: public.Chunk, now: float) -> list[tuple[Sentence, list[public.Chunk]]]:
        self.attempt, self.seq = chunk.attempt, chunk.seq
        self._pause_s = LOOK_S
        self.look_at = now + LOOK_S
        if not self._text.held:
            self.since = now
        self._received += len(chunk.text)
        self._pieces.append((self._received, chunk))
        sentences = self._made(self._text.feed(chunk.text))
        if sentences:
            self.since = now
        return sentences

    def wait(self, now: float) -> None:
        """Nothing new yet: check again later."""
        self._pause_s = min(2 * self._pause_s, LONGEST_LOOK_S)
        self.look_at = now + self._pause_s

    def release(self, now: float) -> list[tuple[Sentence, list[public.Chunk]]]:
        self.since = now
        return self._made(self._text.release())

    def end(self) -> list[tuple[Sentence, list[public.Chunk]]]:
        return self._made(self._text.end())

    def rest(self) -> list[public.Chunk]:
        """The remaining chunks, which no sentence needs."""
        return [chunk for _, chunk in self._pieces]

    def _made(self, texts: list[str]) -> list[tuple[Sentence, list[public.Chunk]]]:
        made: list[tuple[Sentence, list[public.Chunk]]] = []
        for text in texts:
            self._delivered += len(text)
            first = last = self._pieces[0][1]
            done: list[public.Chunk] = []
            ended = 0
            while self._pieces and self._pieces[0][0] <= self._delivered:
                ended, last = self._pieces.popleft()
                done.append(last)
            if self._pieces and ended < self._delivered:
                last = self._pieces[0][1]
            if not text.strip():
                # Blank: its chunks are done with the sentence before or after it.
                if made:
                    made[-1][1].extend(done)
                else:
                    self._pieces.extendleft((self._delivered, chunk) for chunk in reversed(done))
                continue
            sentence = Sentence(
                run=self.run,
                turn=first.turn,
                attempt=last.attempt,
                block=self.block,
                text=text,
                first=first.seq,
                last=last.seq,
            )
            made.append((sentence, done))
        return made


LOOK_AHEAD = 64
Fate = Literal["open", "complete", "void"]


class SentenceSubscription(EnteredOrIterated[Sentence]):
    """Delivers the sentences of all visible text, in order within a block: each once, or with a group at least once.

    Delivery, acknowledgement and errors are those of the underlying subscription to `visible`, see
    `OrderedSubscription` and `SharedSubscription`. A chunk is done when the last sentence that contains a part of it is
    done. Blank sentences are skipped. Text of a discarded attempt that has not been delivered yet is dropped. Use from
    one task at a time.
    """

    def __init__(
        self,
        deployment: Deployment,
        chunks: OrderedSubscription[public.ChunkTopicEvent] | SharedSubscription[public.ChunkTopicEvent],
        *,
        rules: SentenceRules,
        hold_s: float,
        ack: Literal["auto", "explicit"],
        prefetch: int,
    ) -> None:
        """``chunks``: a subscription with explicit acknowledgement. ``hold_s``: held text is delivered as it is after
        this long.
        """
        self._deployment = deployment
        self._chunks = chunks
        self._rules = rules
        self._hold_s = hold_s
        self._auto = ack == "auto"
        self._prefetch = prefetch
        self._runs: dict[tuple[str, int], BlockSentences] = {}
        self._ready: deque[tuple[Sentence, list[public.Chunk]]] = deque()
        self._delivered: dict[int, tuple[Sentence, list[public.Chunk]]] = {}
        """Per sentence (by identity): the chunks that are done with it."""
        self._last: Sentence | None = None
        self._next: asyncio.Task[public.ChunkTopicEvent] | None = None
        self._look_at = 0.0
        if isinstance(chunks, SharedSubscription):
            chunks.decode_returned = _returned

    @property
    def cursor(self) -> Cursor:
        """The position after the sentences that are done; see `OrderedSubscription.cursor`.

        Raises RuntimeError with a group, which keeps its own position, and before the subscription has started.
        """
        if isinstance(self._chunks, SharedSubscription):
            raise RuntimeError("a group keeps its own cursor")
        return self._chunks.cursor

    async def _start(self) -> None:
        await self._chunks.__aenter__()

    async def aclose(self) -> None:
        """End the subscription. With a group, text that is held and was not delivered comes again."""
        await self._chunks.aclose()
        if self._next:
            await asyncio.gather(self._next, return_exceptions=True)  # it ends because its source is closed
        self._runs.clear()
        self._ready.clear()

    def ack(self, sentence: Sentence) -> None:
        """Mark this sentence (the same object) as done (``ack="explicit"``)."""
        given = self._delivered.pop(id(sentence), None)
        for chunk in given[1] if given else ():
            self._chunks.ack(chunk)

    async def each(
        self, handler: Callable[[Sentence], Awaitable[None]], *, concurrency: int = 1, tries: int | None = None
    ) -> None:
        """Call the handler with each sentence, for up to ``concurrency`` runs in parallel, in order within a run.

        A sentence is done when its handler has returned. Returns when the subscription is closed, and closes it on exit
        in any case. If a handler or the iteration raises, the other handlers are cancelled and the error propagates.
        With ``tries``, which needs a group, a sentence that fails is tried again: see `SharedSubscription.each`. Raises
        ValueError for ``tries`` without a group.
        """
        chunks, handle = self._chunks, cast("Callable[[Sentence], Awaitable[object]]", handler)
        if isinstance(chunks, SharedSubscription):
            handle = guarded(chunks, handler, tries)
        elif tries is not None:
            raise ValueError("tries: needs a group, which counts them")
        self._auto = False
        self._chunks.gaps.log_by_default()
        try:
            async with aclosing(until_stopped(self.__anext__)) as sentences:
                await each(sentences, handle, self.ack, concurrency=concurrency, most=self._prefetch)
        finally:
            await self.aclose()

    async def __anext__(self) -> Sentence:
        self._last_is_done()
        while not self._ready:
            await self._advance()
        sentence, chunks = self._ready.popleft()
        self._delivered[id(sentence)] = sentence, chunks
        if self._auto:
            self._last = sentence
        return sentence

    def _last_is_done(self) -> None:
        if self._last is not None:
            self.ack(self._last)
            self._last = None

    async def _advance(self) -> None:
        """Take the next chunk, or check the logs of texts that have stopped growing."""
        now = asyncio.get_running_loop().time
        if self._next is None:
            self._next = asyncio.ensure_future(self._chunks.__anext__())
        wait_s = max(0.0, self._look_at - now()) if self._runs else None
        await asyncio.wait({self._next}, timeout=wait_s)
        if self._next.done():
            task, self._next = self._next, None
            self._add_event(task.result(), now())
        if self._runs and now() >= self._look_at:
            await self._check_logs(now())
            self._look_at = now() + LOOK_S

    def _add_event(self, chunk: public.ChunkTopicEvent | Sentence, now: float) -> None:
        if isinstance(chunk, Sentence):  # it was given back
            self._ready.append((chunk, [cast("public.Chunk", chunk)]))
            return
        if isinstance(chunk, public.UnknownEvent):
            self._chunks.ack(chunk)
            return
        key = chunk.run, chunk.block
        voice = self._runs.get(key)
        if voice is None:
            if not self._runs:
                self._look_at = now + LOOK_S
            voice = self._runs[key] = BlockSentences(self._rules, chunk)
        if chunk.seq <= voice.seq:
            self._chunks.ack(chunk)  # redelivered after it was done
            return
        self._ready += voice.add(chunk, now)

    async def _check_logs(self, now: float) -> None:
        keys = await self._deployment.keys()
        if isinstance(self._chunks, SharedSubscription):
            held = set(self._chunks.partitions)
            self._runs = {key: v for key, v in self._runs.items() if not held.isdisjoint(keys.places(key[0]))}
        still = [(key, voice) for key, voice in self._runs.items() if now >= voice.look_at]
        fates = await asyncio.gather(*(self._fate(keys, voice) for _, voice in still))
        for (key, voice), fate in zip(still, fates, strict=True):
            if fate == "complete":
                self._ready += voice.end()
            elif fate == "open":
                voice.wait(now)
                if now - voice.since >= self._hold_s:
                    self._ready += voice.release(now)
                continue
            for chunk in voice.rest():
                self._chunks.ack(chunk)
            del self._runs[key]

    async def _fate(self, keys: Keys, voice: BlockSentences) -> Fate:
        """What the run's log says about the block after the last chunk received."""
        numbers = keys.numbers  # before the log is read: another run's look may learn a new number meanwhile
        try:
            async with self._deployment.hub.reads:
                with translated(self._deployment.server):
                    await locate(self._deployment.server, keys, voice.run)
                    log = keys.log(voice.run)
                    entries: list[Entry] = await self._deployment.server.client.xrange(
                        log, f"({voice.attempt}-{voice.seq}", count=LOOK_AHEAD
                    )
                    gone = not entries and not await self._deployment.server.client.exists(log)
                if gone:
                    await self._deployment.refresh(older_than_s=0)
                    if keys.numbers != numbers:  # it was looked for by the earlier number of partitions
                        return "open"
        except ServerUnavailable:
            return "open"
        return "complete" if gone else run_outcome(voice.block, events_of(log, entries, self._chunks.gaps))


def _returned(stream: str, entry: Entry) -> Sentence:
    """A sentence of this group that was a dead letter. Raises Malformed."""
    try:
        return msgspec.json.decode(entry[1][DATA_FIELD.encode()], type=Sentence)
    except (KeyError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise Malformed(f"{stream} {entry[0].decode()}", f"no sentence: {e!r}") from None


def events_of(log: str, entries: Iterable[Entry], gaps: Gaps) -> list[public.PublicEvent]:
    """The events of a run's log. Entries that are none are counted and skipped, as those of a topic are: they end no
    other run's sentences.
    """
    events: list[public.PublicEvent] = []
    for entry in entries:
        try:
            events.append(public_event(log, entry))
        except Malformed as e:
            gaps.was_malformed(e)
    return events


def run_outcome(block: int, events: list[public.PublicEvent]) -> Fate:
    """What the events after a chunk, in order, say about its block."""
    for event in events:
        match event:
            case public.Chunk() if event.block == block:
                return "open"
            case public.BlockComplete() if event.block == block:
                return "complete"
            case public.Retrying() | public.Restarted() if event.drop_from <= block:
                return "void"
            case _ if isinstance(event, public.TERMINAL):
                return "complete"
            case _:
                pass
    return "open"
