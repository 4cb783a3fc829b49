"""Who looks at the console, and what they may do. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tokenbus_services.gateway.keys.key import KeyEntry
from tokenbus_services.gateway.problem import Problem, Refusal
from tokenbus_services.gateway.runs import not_found
from tokenbus_services.settings.tables.console import CONSOLE_ROLES, ConsoleRole, ConsoleSettings


class Viewer(msgspec.Struct, frozen=True, kw_only=True):
    """A person at the console."""

    name: str | None = None
    """Id of the key that logged in; None without keys."""
    roles: frozenset[ConsoleRole] = frozenset()
    tenant: str | None = None
    """Sees the runs of this tenant alone; None: of all."""
    run: str | None = None
    """Came by a link: sees this run alone."""

    def may(self, role: ConsoleRole) -> bool:
        """Whether the viewer has this role."""
        return role in self.roles

    def require(self, role: ConsoleRole) -> None:
        """Raise Refusal (401 for a viewer who has not logged in, else 403) if the viewer has not this role."""
        if self.may(role):
            return
        if not self.roles:
            why = "log in with a key that has console roles"
            raise Refusal(Problem(status=401, code="login_needed", message=why, kind="auth"))
        why = f"this needs the console role {role}"
        raise Refusal(Problem(status=403, code="role_missing", message=why, kind="auth"))

    def require_all_runs(self) -> None:
        """Raise Refusal (403) for a viewer of a single run."""
        if self.run is not None:
            why = "a link shows one run alone"
            raise Refusal(Problem(status=403, code="role_missing", message=why, kind="auth"))

    def check_run(self, run: str) -> None:
        """Raise Refusal (404) if a link is for another run."""
        if self.run not in (None, run):
            raise not_found(run)


NOBODY = Viewer()
"""Has not logged in."""


def with_implied(roles: Iterable[ConsoleRole]) -> frozenset[ConsoleRole]:
    """The roles, and that to see runs if there are any."""
    given = frozenset[ConsoleRole](roles)
    return given.union(("see_runs",)) if given else given


def viewer_without_keys(settings: ConsoleSettings) -> Viewer:
    """Everybody, at a gateway without keys."""
    return Viewer(roles=with_implied(settings.roles_without_keys))


def viewer_of(entry: KeyEntry) -> Viewer:
    """The viewer who logged in with a key of this client."""
    roles = with_implied(entry.rules.console)
    sees_all = entry.rules.operator or "admin" in roles
    return Viewer(name=entry.id, roles=roles, tenant=None if sees_all else entry.rules.tenant or entry.id)


def listed(viewer: Viewer) -> list[ConsoleRole]:
    """The viewer's roles in a fixed order."""
    return [role for role in CONSOLE_ROLES if viewer.may(role)]
