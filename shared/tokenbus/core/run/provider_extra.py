"""The run's `provider_extra`: what a provider says beside its answer, and opaque data that comes after its block."""

from __future__ import annotations

from collections.abc import Mapping

from tokenbus.core.run.opaque import OpaqueTracker
from tokenbus.core.run.state import RunState
from tokenbus.events.normalized import Opaque


def keep(s: RunState, data: Opaque) -> None:
    """Keep it with its block; where that has ended, for the run's end. Raises TooLarge."""
    ended = s.blocks.keep(data)
    if ended is not None:
        late = s.late.setdefault(ended, OpaqueTracker(dict(s.blocks.origin)))
        late.add(data.name, data.value, data.blob_id)


def drop_void(s: RunState, drop_from: int) -> None:
    """Blocks of the turn from this number on are void, and so is what was to go back with them or after them."""
    s.late = {number: late for number, late in s.late.items() if number < drop_from}
    first_void = -1 if drop_from <= s.first_block else drop_from - 1
    s.extras = [
        _unplaced(extra) if extra.get("turn") == s.turn and _after(extra) >= first_void else extra for extra in s.extras
    ]


def extras_of(s: RunState) -> list[dict[str, object]]:
    """The run's `provider_extra`."""
    late: list[dict[str, object]] = []
    for number, handed in sorted(s.late.items()):
        late.append({"block": number, **handed.fields})
        late += handed.notes
    return [*s.extras, *late]


def without_places(extras: list[dict[str, object]] | None) -> list[dict[str, object]] | None:
    """The same for a run whose blocks others number or change: nothing in it goes back to the provider."""
    return [_unplaced(extra) for extra in extras if "block" not in extra] or None if extras else extras


def _after(extra: Mapping[str, object]) -> int:
    after = extra.get("after")
    return after if isinstance(after, int) else -1


def _unplaced(extra: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in extra.items() if name not in ("turn", "after")}
