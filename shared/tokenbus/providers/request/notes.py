"""Notes about repairs, conversions and omissions made while building a request, published when the run ends."""

from __future__ import annotations

MOST_PLACES = 3
"""Maximum number of message locations named in one sentence; the rest are counted."""


class Notes:
    """Collects notes, with the locations that each applies to."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, str], list[str]] = {}

    def add(self, where: str, problem: str) -> None:
        """Record a note for a location.

        Locations in the request's own messages share one sentence, because a long history has many. Locations in the
        run's own turns get a sentence each: they grow with every turn, and earlier sentences must not change.
        """
        key = (problem, where if where.startswith("history") else "")
        places = self._places.setdefault(key, [])
        if where not in places:
            places.append(where)

    @property
    def sentences(self) -> tuple[str, ...]:
        """All sentences, in the order in which they were first recorded."""
        return tuple(f"{_listed(places)}: {problem}" for (problem, _), places in self._places.items())


def _listed(places: list[str]) -> str:
    more = len(places) - MOST_PLACES
    return ", ".join(places[:MOST_PLACES]) + (f" and {more} more" if more > 0 else "")
