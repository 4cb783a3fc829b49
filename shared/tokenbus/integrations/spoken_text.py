"""Finds how far a listener heard a run, given the text that was spoken. Pure.

A framework reports the spoken text only approximately: words are separated by one space, and markup is left out. So
only letters and digits are compared.
"""

from __future__ import annotations

from bisect import bisect_right


class SpokenText:
    """A run's visible text, with the seq of each piece."""

    def __init__(self) -> None:
        self._letters: list[str] = []
        self._ends: list[int] = []
        """For each piece, how many letters there are up to its end."""
        self._seqs: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._seqs)

    def add(self, seq: int, text: str) -> None:
        """The next piece, and the seq of its event."""
        self._letters += _letters(text)
        self._ends.append(len(self._letters))
        self._seqs.append(seq)

    def overlap(self, spoken: str) -> int:
        """How many letters this text and the spoken one have in common from the beginning."""
        letters = _letters(spoken)
        both = enumerate(zip(self._letters, letters, strict=False))
        return next((i for i, (ours, theirs) in both if ours != theirs), min(len(self._letters), len(letters)))

    def through(self, spoken: str) -> int:
        """Seq of the last piece that was spoken whole; -1 if none was."""
        common = self.overlap(spoken)
        whole = bisect_right(self._ends, common) if common else 0
        return self._seqs[whole - 1] if whole else -1


def _letters(text: str) -> list[str]:
    return [letter for letter in text.casefold() if letter.isalnum()]
