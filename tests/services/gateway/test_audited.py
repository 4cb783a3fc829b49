"""Every route, console action and command that changes something is known here, with its audit entry or a reason.

One that is added fails until somebody has decided. tests/e2e/operating/test_audit.py shows that entries are written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from starlette.routing import Route, WebSocketRoute

from tokenbus_services.cli.main import tokenbus
from tokenbus_services.console.app import create as create_console
from tokenbus_services.gateway.app import create
from tokenbus_services.gateway.forward.table import TABLE
from tokenbus_services.gateway.routes.forwarded import paths_of
from tokenbus_services.settings import read_file

PAGE = Path(__file__).parents[3] / "docs" / "operate" / "audit.md"
CONSOLE = "/console/api"

ENTRIES: dict[str, str] = {
    "POST /runs/{run}/cancel": "cancel",
    "POST /runs/{run}/waiting/{wait}": "decide",
    "POST /sessions/{session}/events": "session.configure",
    "POST /sessions/{session}/fork": "session.fork",
    "DELETE /sessions/{session}": "session.delete",
    "POST /v1/stream/sessions/{session}": "session.configure",
    "PUT /v1/stream/sessions/{session}": "session.configure",
    "DELETE /v1/stream/sessions/{session}": "session.delete",
    "POST /v1/sessions": "session.configure",
    "POST /v1/sessions/{id}": "session.configure",
    "POST /v1/sessions/{id}/events": "session.interrupt",
    "DELETE /v1/sessions/{id}": "session.delete",
    "POST /v1/sessions/{id}/archive": "session.configure",
    "POST /v1/agents": "session.configure",
    "POST /v1/agents/{id}/archive": "session.configure",
    "POST /api/chat/{chat:path}/stop": "cancel",
    "DELETE /agui/runs/{run:path}": "cancel",
    "POST /v1/responses/{id}/cancel": "cancel",
    "DELETE /v1/responses/{id}": "erase",
    "WEBSOCKET /v1/responses": "steer",
    "POST /v1/conversations/{id}": "conversation.change",
    "DELETE /v1/conversations/{id}": "conversation.delete",
    "DELETE /v1/conversations/{id}/items/{item}": "conversation.delete_item",
    f"POST {CONSOLE}/runs/{{run}}/cancel": "cancel",
    f"POST {CONSOLE}/runs/{{run}}/retry": "retry",
    f"POST {CONSOLE}/runs/{{run}}/resume": "resume",
    f"POST {CONSOLE}/runs/{{run}}/waiting/{{wait}}": "decide",
    f"POST {CONSOLE}/sessions/{{session}}/events": "session.message",
    f"POST {CONSOLE}/dead/{{entry}}/retry": "dead.retry",
    f"POST {CONSOLE}/dead/{{entry}}/drop": "dead.drop",
    "POST /keys": "keys.create",
    "PUT /keys/{key_id}": "keys.change",
    "DELETE /keys/{key_id}": "keys.revoke",
    "POST /keys/{key_id}/rotate": "keys.rotate",
    "command cancel": "cancel",
    "command approve": "decide",
    "command deny": "decide",
    "command answer": "decide",
    "command chat": "session.interrupt",
    "command erase": "erase",
    "command repartition": "repartition",
    "command dead retry": "dead.retry",
    "command dead drop": "dead.drop",
    "command keys create": "keys.create",
    "command keys rotate": "keys.rotate",
    "command keys revoke": "keys.revoke",
}
"""The entry; the first of those that it may write."""
SAID = "what a client says: the runs, sessions and conversations have it, and the log a line for each request"
LOGIN = "the log has a line for each"
READS = "changes nothing of the deployment"
WITHOUT: dict[str, str] = {
    **dict.fromkeys(
        (
            "POST /runs",
            "POST /runs/{run}/retry",
            "POST /runs/{run}/resume",
            "POST /v1/chat/completions",
            "POST /v1/responses",
            "POST /v1/images/generations",
            "POST /v1/messages",
            "POST /v1/v1/messages",
            "POST /api/chat",
            "WEBSOCKET /api/chat",
            "POST /agui",
            "POST /v1/conversations",
            "POST /v1/conversations/{id}/items",
            "POST /v1/models/{model:path}:generateContent",
            "POST /v1/models/{model:path}:streamGenerateContent",
            "POST /v1beta/{model:path}:generateContent",
            "POST /v1beta/{model:path}:streamGenerateContent",
            "POST /gemini/v1/{model:path}:generateContent",
            "POST /gemini/v1/{model:path}:streamGenerateContent",
            "POST /gemini/v1beta/{model:path}:generateContent",
            "POST /gemini/v1beta/{model:path}:streamGenerateContent",
            "command send",
        ),
        SAID,
    ),
    "POST /v1/environments": "makes nothing: its answer is always the same",
    f"POST {CONSOLE}/login": LOGIN,
    f"POST {CONSOLE}/logout": LOGIN,
    f"POST {CONSOLE}/tickets": READS,
    **dict.fromkeys(
        (
            *(f"command {name}" for name in ("tail", "runs", "follow", "waiting", "top", "slots", "doctor", "check")),
            *(f"command {name}" for name in ("audit", "dead list", "dead show", "records show", "records export")),
            *(f"command {name}" for name in ("replay", "keys list", "spend")),
        ),
        READS,
    ),
    "command scripts": "loads the scripts of this version, which change nothing by themselves",
    **dict.fromkeys(("command worker", "command up", "command demo"), "starts services, whose logs say so"),
}
NOT_CHANGED = frozenset(
    {
        "uploads a part of a file",
        "ends an upload",
        "searches a vector store",
    }
)
"""Forwarded paths of one thing that change nothing that others would miss."""


def commands(command: click.Command, name: str) -> Iterator[str]:
    if isinstance(command, click.Group):
        for sub, each in command.commands.items():
            yield from commands(each, f"{name} {sub}")
    else:
        yield name


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> set[str]:
    """Method and path of every route that writes, of a gateway with all that it can have; and all commands."""
    found: set[str] = set()
    of_route, of_socket = Route.__init__, WebSocketRoute.__init__

    def route(self: Route, path: str, *given: Any, **more: Any) -> None:
        of_route(self, path, *given, **more)
        found.update(f"{method} {path}" for method in self.methods or ())

    def socket(self: WebSocketRoute, path: str, *given: Any, **more: Any) -> None:
        of_socket(self, path, *given, **more)
        found.add(f"WEBSOCKET {path}")

    monkeypatch.setattr(Route, "__init__", route)
    monkeypatch.setattr(WebSocketRoute, "__init__", socket)
    monkeypatch.setenv("TOKENBUS_GATEWAY_ADMIN_TOKEN", "t" * 40)
    kinds = sorted({path.kind for path in TABLE})
    path = tmp_path / "tokenbus.toml"
    path.write_text(f'redis_url = "redis://127.0.0.1:1"\n[console]\n[gateway]\nforward = {kinds}\n[gateway.admin]\n')
    create(read_file(path), create_console=create_console)
    writing = {one for one in found if one.split()[0] not in ("GET", "HEAD") and "{rest:path}" not in one}
    return writing | set(commands(tokenbus, "command"))


def plain(one: str, known: set[str]) -> str:
    """The same route where most clients find it."""
    method, _, path = one.partition(" ")
    for other in (path.removeprefix("/anthropic"), f"/v1{path}"):
        if one not in known and f"{method} {other}" in known:
            return f"{method} {other}"
    return one


def test_each_action_has_an_entry_or_a_reason(there: set[str]) -> None:
    forwarded = {f"{path.method} {route}" for path in TABLE for route in paths_of(path)}
    known = {*ENTRIES, *WITHOUT}
    assert {plain(one, known) for one in there - (forwarded - known)} == known


def test_each_forwarded_path_that_changes_a_thing_that_is_there_has_an_entry() -> None:
    changing = {path.what for path in TABLE if path.method != "GET" and "{id}" in path.path}
    assert {path.what for path in TABLE if path.action} == changing - NOT_CHANGED


def test_the_page_has_each_entry() -> None:
    named = set(re.findall(r"`([a-z_.]+)`", PAGE.read_text()))
    assert set(ENTRIES.values()) <= named
