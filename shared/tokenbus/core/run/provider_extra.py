"""The run's `provider_extra`: extra data of a provider, and opaque data that arrives after its block's end."""

from __future__ import annotations

from collections.abc import Container, Iterable

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
    """Drop data that would go back with void blocks (those numbered ``drop_from`` and up)."""
    s.late_opaque = {number: late for number, late in s.late_opaque.items() if number < drop_from}


def extras_of(s: RunState) -> list[dict[str, object]]:
    late: list[dict[str, object]] = []
    for number, handed in sorted(s.late_opaque.items()):
        late.append({"block": number, **handed.fields})
        late += handed.notes
    return s.extras.entries(late)


def renumbered(
    extras: list[dict[str, object]] | None, numbers: Iterable[tuple[int, int]], intact: Container[int]
) -> list[dict[str, object]] | None:
    """`provider_extra` after a writer's renumbering of blocks. Data of blocks that are not ``intact`` is left out.

    ``numbers``: for each block its number before and after the writer.
    """
    places = {before: after for before, after in numbers if after in intact}
    kept: list[dict[str, object]] = []
    for extra in extras or ():
        block = extra.get("block")
        if not isinstance(block, int):
            kept.append(extra)
        elif block in places:
            kept.append({**extra, "block": places[block]})
    return kept or None
