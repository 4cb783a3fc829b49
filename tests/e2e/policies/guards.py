"""Small policies of the end-to-end tests; each leaves a mark that a test can read."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from tests.waiting import eventually
from tokenbus.events.public import Chunk, PublicEvent
from tokenbus.policy.processor import NewText, StreamContext, StreamProcessor
from tokenbus.policy.stream_state import StreamState


class Word(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    word: str = ""
    by: str = ""


class Holding(StreamProcessor):
    Options = Word

    def __init__(self, options: Word) -> None:
        super().__init__(options)
        self._held: list[PublicEvent] = []


class NoTool(Holding):
    """Holds each tool call back until it is complete, and those of the tool ``word`` for good."""

    async def on_chunk(self, chunk: PublicEvent, state: StreamState, context: StreamContext) -> None:
        if getattr(chunk, "kind", "") != "tool_call":
            await context.send(chunk)
            return
        self._held.append(chunk)
        if block := state.just_completed:
            held, self._held = self._held, []
            if getattr(block, "name", "") == self.options.word:
                context.decided("block", block, reason="not this one")
                return
            for each in held:
                await context.send(each)


class WholeRun(Holding):
    """Holds everything until the run ends, and waits for a file `go` in the folder MARKS before it lets it out."""

    async def on_chunk(self, chunk: PublicEvent, state: StreamState, context: StreamContext) -> None:
        self._held.append(chunk)

    async def on_end(self, state: StreamState, context: StreamContext) -> None:
        marks = Path(os.environ["MARKS"])
        (marks / f"judging-{context.run}").touch()
        await eventually((marks / "go").exists, timeout=80)
        for each in self._held:
            await context.send(each)


class Replace(StreamProcessor):
    """Replaces the word ``word`` by ``by``, also if it arrives in two pieces."""

    Options = Word

    def __init__(self, options: Word) -> None:
        super().__init__(options)
        self._text = ""
        self._last: PublicEvent | None = None

    async def on_chunk(self, chunk: PublicEvent, state: StreamState, context: StreamContext) -> None:
        if isinstance(chunk, Chunk) and chunk.kind == "text":
            self._text, self._last = (self._text + chunk.text).replace(self.options.word, self.options.by), chunk
            keep = len(self.options.word) - 1
            out, self._text = self._text[:-keep], self._text[-keep:]
            await context.send(context.with_text(chunk, out))
            return
        if self._last and state.just_completed:
            await context.send(context.with_text(self._last, self._text))
            self._text, self._last = "", None
        await context.send(chunk)


class StopAt(StreamProcessor):
    """Ends the run when the text reaches ``word``."""

    Options = Word

    async def on_chunk(self, chunk: PublicEvent, state: StreamState, context: StreamContext) -> None:
        block = state.current_block
        if block and self.options.word in block.text:
            await context.send(NewText(self.options.by))
            context.terminate(f"it came to {self.options.word!r}")
            return
        await context.send(chunk)


class Broken(StreamProcessor):
    """Fails at the first text."""

    Options = Word

    async def on_chunk(self, chunk: PublicEvent, state: StreamState, context: StreamContext) -> None:
        if isinstance(chunk, Chunk):
            raise RuntimeError("broken on purpose")
        await context.send(chunk)


class Slow(Holding):
    """Puts each text off until a file `go` is in the folder MARKS; the rest flows on. Counts its calls there."""

    async def on_chunk(self, chunk: PublicEvent, state: StreamState, context: StreamContext) -> None:
        if getattr(chunk, "kind", "") != "text":
            await context.send(chunk)
            return
        self._held.append(chunk)
        if state.just_completed:
            held, self._held = self._held, []
            context.later(self._judged(state.just_completed.text, held), holding=held)

    async def _judged(self, text: str, held: list[PublicEvent]) -> list[PublicEvent]:
        marks = Path(os.environ["MARKS"])
        with (marks / "calls").open("a") as calls:
            calls.write(f"{text}\n")
        await eventually((marks / "go").exists, timeout=80)
        return held


class AsksTheBus(Holding):
    """Withholds a run's text until a model, called through the bus, has judged it."""

    async def on_chunk(self, chunk: PublicEvent, state: StreamState, context: StreamContext) -> None:
        self._held.append(chunk)

    async def on_end(self, state: StreamState, context: StreamContext) -> None:
        assert context.client
        published = await context.client.publish(
            {"provider": "anthropic", "model": "short", "messages": [{"role": "user", "content": "Well?"}]}
        )
        await context.send(NewText(f"[{(await published.result()).text}] "))
        for each in self._held:
            await context.send(each)
