"""Which runs a page shows. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

import msgspec

from tokenbus_services.console.access.viewer import Viewer
from tokenbus_services.console.runs.known_run import KnownRun
from tokenbus_services.console.runs.run_view import State
from tokenbus_services.gateway.problem import invalid

MAX_ROWS = 200
_MAX_TEXT = 200


class PageView(msgspec.Struct, frozen=True, kw_only=True):
    """What one page shows. Pages with equal views share their rows."""

    q: str = ""
    """Text in the run's id, tenant, provider, model or error code; in lower case."""
    state: str = ""
    tenant: str = ""
    provider: str = ""
    error: str = ""
    limit: int = MAX_ROWS
    scope: str | None = None
    """The viewer's tenant; None: sees all."""
    content: bool = False

    def matches(self, known: KnownRun) -> bool:
        """Whether the page counts and shows this run."""
        info = known.info
        return (
            (self.scope is None or info.tenant == self.scope)
            and (not self.tenant or info.tenant == self.tenant)
            and (not self.provider or info.provider == self.provider)
            and (not self.error or info.error == self.error)
            and (not self.q or self.q in known.text)
        )


def view_of(query: Mapping[str, str], viewer: Viewer) -> PageView:
    """The view of a page's query. Raises Refusal (400) for a wrong value."""
    given = {name: query.get(name, "")[:_MAX_TEXT] for name in ("q", "state", "tenant", "provider", "error")}
    if given["state"] and given["state"] not in get_args(State):
        raise invalid("state", f"must be one of {', '.join(get_args(State))}")
    limit = query.get("limit", "")
    if limit and not (limit.isascii() and limit.isdigit() and len(limit) < 6):
        raise invalid("limit", "must be a number")
    given["q"] = given["q"].strip().lower()
    rows = max(1, min(MAX_ROWS, int(limit or MAX_ROWS)))
    return PageView(**given, limit=rows, scope=viewer.tenant, content=viewer.may("see_content"))
