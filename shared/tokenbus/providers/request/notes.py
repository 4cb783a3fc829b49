"""What building a request had to mend, convert or leave out: a sentence each, told at the run's end."""

from __future__ import annotations

MOST_PLACES = 3
"""Places of a request's messages named in one sentence; more are counted."""


class Notes:
    """The sentences so far, each with the places that it is about."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, str], list[str]] = {}

    def add(self, where: str, problem: str) -> None:
        """Say this of a place.

        Places of the request's own messages share a sentence: a long history has many. Those of the run's own turns
        have one each, for they grow with each turn, and what was said before must read the same.
        """
        key = (problem, where if where.startswith("history") else "")
        places = self._places.setdefault(key, [])
        if where not in places:
            places.append(where)

    @property
    def told(self) -> tuple[str, ...]:
        """All of them, in the order in which they came up."""
        return tuple(f"{_listed(places)}: {problem}" for (problem, _), places in self._places.items())


def _listed(places: list[str]) -> str:
    more = len(places) - MOST_PLACES
    return ", ".join(places[:MOST_PLACES]) + (f" and {more} more" if more > 0 else "")
