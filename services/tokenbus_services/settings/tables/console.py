"""The console: pages on the gateway's port that show runs as they happen."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from msgspec import Meta

from tokenbus_services.settings.types import Table

ConsoleRole = Literal["see_runs", "see_content", "act", "admin"]
CONSOLE_ROLES: tuple[ConsoleRole, ...] = get_args(ConsoleRole)


class ConsoleSettings(Table, frozen=True, kw_only=True):
    """If the table is there, the gateway serves the console under `/console/`. Needs a table `[gateway]`."""

    enabled: bool = True
    """False: no console, also under `tokenbus up`."""
    roles_without_keys: tuple[ConsoleRole, ...] = ("see_runs", "act")
    """What everybody may do at a gateway without keys, which listens on loopback only. With keys, each key's `console`
    says it.
    """
    session_hours: Annotated[float, Meta(gt=0, le=24 * 30)] = 12.0
    """A login ends after this time, or with its key."""
    ticket_minutes: Annotated[float, Meta(gt=0, le=24 * 60)] = 15.0
    """A link to a run that a colleague without a key may open is valid for this long."""
