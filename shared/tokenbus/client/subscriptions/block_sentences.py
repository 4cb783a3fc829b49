"""The text of one block as sentences, each with the chunks that are done with it. Pure."""

from __future__ import annotations

from collections import deque

import msgspec

from tokenbus.events.public import Chunk
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

    def __init__(self, rules: SentenceRules, chunk: Chunk) -> None:
        self.run, self.block = chunk.run, chunk.block
        self.attempt, self.seq = chunk.attempt, -1
        self.since = 0.0
        """When the oldest held text arrived."""
        self.look_at = 0.0
        self._text = Sentences(rules)
        self._pause_s = LOOK_S
        self._pieces: deque[tuple[int, Chunk]] = deque()
        """Chunks not fully delivered, each with its end offset in the block."""
        self._received = 0
        self._delivered = 0

    def add(self, chunk: Chunk, now: float) -> list[tuple[Sentence, list[Chunk]]]:
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

    def release(self, now: float) -> list[tuple[Sentence, list[Chunk]]]:
        self.since = now
        return self._made(self._text.release())

    def end(self) -> list[tuple[Sentence, list[Chunk]]]:
        return self._made(self._text.end())

    def rest(self) -> list[Chunk]:
        """The remaining chunks, which no sentence needs."""
        return [chunk for _, chunk in self._pieces]

    def _made(self, texts: list[str]) -> list[tuple[Sentence, list[Chunk]]]:
        made: list[tuple[Sentence, list[Chunk]]] = []
        for text in texts:
            self._delivered += len(text)
            first = last = self._pieces[0][1]
            done: list[Chunk] = []
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
