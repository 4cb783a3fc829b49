"""The run's `provider_extra`: extra data of a provider, and opaque data that arrives after its block's end."""

from __future__ import annotations

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
    """The run's `provider_extra`."""
    late: list[dict[str, object]] = []
    for number, handed in sorted(s.late_opaque.items()):
        late.append({"block": number, **handed.fields})
        late += handed.notes
    return [*s.extras, *late]


def without_places(extras: list[dict[str, object]] | None) -> list[dict[str, object]] | None:
    """`provider_extra` without the data of ended blocks, for runs whose blocks policies renumber or change."""
    return [extra for extra in extras if "block" not in extra] or None if extras else extras
