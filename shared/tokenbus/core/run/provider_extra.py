"""The run's `provider_extra`: extra data of a provider, and opaque data that arrives after its block's end."""

from __future__ import annotations

from collections.abc import Mapping

from tokenbus.core.run.blocks.opaque import OpaqueTracker
from tokenbus.core.run.state import RunState
from tokenbus.events.normalized import Opaque


def keep(s: RunState, data: Opaque) -> None:
    """Keep opaque data with its block or, if the block has ended, for the end of the run. Raises TooLarge."""
    ended = s.blocks.keep(data)
    if ended is not None:
        late = s.late_opaque.setdefault(ended, OpaqueTracker(dict(s.blocks.origin)))
        late.add(data.name, data.value, data.blob_id)


def drop_void(s: RunState, drop_from: int) -> None:
    """Drop data that would go back with or after the turn's void blocks (those numbered ``drop_from`` and up)."""
    s.late_opaque = {number: late for number, late in s.late_opaque.items() if number < drop_from}
    first_void = -1 if drop_from <= s.first_block else drop_from - 1
    s.extras = [
        _unplaced(extra) if extra.get("turn") == s.turn and _after(extra) >= first_void else extra for extra in s.extras
    ]


def extras_of(s: RunState) -> list[dict[str, object]]:
    """The run's `provider_extra`."""
    late: list[dict[str, object]] = []
    for number, handed in sorted(s.late_opaque.items()):
        late.append({"block": number, **handed.fields})
        late += handed.notes
    return [*s.extras, *late]


def without_places(extras: list[dict[str, object]] | None) -> list[dict[str, object]] | None:
    """`provider_extra` without block references, for runs whose blocks policies renumber or change; nothing is sent
    back.
    """
    return [_unplaced(extra) for extra in extras if "block" not in extra] or None if extras else extras


def _after(extra: Mapping[str, object]) -> int:
    after = extra.get("after")
    return after if isinstance(after, int) else -1


def _unplaced(extra: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in extra.items() if name not in ("turn", "after")}
