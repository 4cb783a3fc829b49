"""Divides something limited among its users, so that nobody can take all of it."""

from __future__ import annotations


class FairShare:
    """A capacity that owners take from and give back to. No IO.

    An owner may hold as much as remains free for everybody else, and no more. So a single owner can take half. If n
    owners take what they can, each has one part in n + 1, and the same is left for the next one.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: dict[str, int] = {}
        self._total = 0

    def take(self, owner: str | None, amount: int = 1) -> bool:
        """Take an amount, or return False. ``owner``: None if there are no others: it may take everything."""
        total = self._total + amount
        held = 0 if owner is None else self._held.get(owner, 0) + amount
        if total > self._capacity or held > self._capacity - total:
            return False
        self._total = total
        if owner is not None:
            self._held[owner] = held
        return True

    def give_back(self, owner: str | None, amount: int = 1) -> None:
        """Return what was taken."""
        self._total -= amount
        if owner is None:
            return
        self._held[owner] -= amount
        if not self._held[owner]:
            del self._held[owner]

    @property
    def total(self) -> int:
        """What all owners hold."""
        return self._total
