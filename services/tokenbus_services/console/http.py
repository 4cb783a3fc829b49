"""What all routes of the console have in common: who looks, the page's token, answers, and the audit line."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from tokenbus.errors import TokenbusError
from tokenbus_services.console.access.session import ConsoleSessions, Viewer
from tokenbus_services.gateway.answers import asgi
from tokenbus_services.gateway.callers import Caller
from tokenbus_services.gateway.gateway import Gateway
from tokenbus_services.gateway.http_request import read_request
from tokenbus_services.gateway.problem import Problem, Refusal, defect, invalid, of_exception, restarting
from tokenbus_services.gateway.surfaces.contract import Answer, TranslationRules
from tokenbus_services.net.web_socket import UNKNOWN
from tokenbus_services.settings.tables.gateway import ConsoleRole

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

SURFACE = "console"
MAX_BODY = 64 * 1024
Handler: TypeAlias = Callable[[Request], Awaitable[Any]]
ViewHandler: TypeAlias = Callable[[Request, Viewer], Awaitable[Any]]


class Desk:
    """Wraps the handlers of routes."""

    def __init__(self, gateway: Gateway, sessions: ConsoleSessions) -> None:
        self.gateway = gateway
        self.sessions = sessions

    def open(self, handle: Handler) -> Handler:
        """A route for everybody."""

        async def endpoint(request: Request) -> Any:
            try:
                self.gateway.enter(request.scope, UNKNOWN)
                answer = await handle(request)
            except Refusal as e:
                answer = refused(e.problem)
            except TokenbusError as e:
                answer = refused(of_exception(e))
            except ClientDisconnect:
                answer = Response(status_code=499)
            except asyncio.CancelledError:  # the server stops, and waits for nothing but this answer
                answer = refused(restarting())
            except Exception:
                log.exception("request_failed", surface=SURFACE)
                answer = refused(defect())
            return self.gateway.counted(SURFACE, request, answer, of_key=False)

        return endpoint

    def view(self, role: ConsoleRole, handle: ViewHandler, *, links: bool = False) -> Handler:
        """A route for viewers with a role. ``links``: also for viewers with a link to one run."""

        async def checked(request: Request) -> Any:
            return await handle(request, await self.viewer(request, role, links=links))

        return self.open(checked)

    def action(self, role: ConsoleRole, handle: ViewHandler, *, links: bool = False) -> Handler:
        """Like `view`, for a request that changes something: it must come from a page of the console."""

        async def checked(request: Request) -> Any:
            viewer = await self.viewer(request, role, links=links)
            await self.sessions.check_csrf(request)
            return await handle(request, viewer)

        return self.open(checked)

    async def viewer(self, request: Request, role: ConsoleRole, *, links: bool = False) -> Viewer:
        """Who looks. Raises Refusal (401, 403)."""
        viewer = await self.sessions.viewer(request)
        request.state.caller = caller_of(viewer, self.gateway)
        if viewer.name:
            self.gateway.enter(request.scope, viewer.name)
        viewer.require(role)
        if not links:
            viewer.require_all_runs()
        return viewer

    async def run(self, request: Request, viewer: Viewer) -> str:
        """The run of the path. Raises Refusal (404) if it does not exist, or is not one that the viewer may see."""
        run: str = request.path_params["run"]
        viewer.check_run(run)
        return (await self.gateway.runs.owned(run, caller_of(viewer, self.gateway))).id

    async def changed(self, action: str, viewer: Viewer, **facts: object) -> None:
        """A line in the log, and an entry in the deployment's audit, for something done. Raises ServerError."""
        self.log(action, viewer, **facts)
        await self.gateway.runs.changes.note(caller_of(viewer, self.gateway), SURFACE, action, **facts)

    def log(self, action: str, viewer: Viewer, **facts: object) -> None:
        """One line in the log for an action. Never any content."""
        log.info("console_action", action=action, key=viewer.name, tenant=viewer.tenant, **facts)


class WithSafeHeaders:
    """ASGI app: every answer of the console forbids strangers' scripts and frames."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        async def safe(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                given = list(message.get("headers", ()))
                names = {name for name, _ in given}
                more = {**SAFE_HEADERS, "cache-control": "no-store"}
                given += [(n.encode(), v.encode()) for n, v in more.items() if n.encode() not in names]
                message["headers"] = given
            await send(message)

        await self.app(scope, receive, safe)


def caller_of(viewer: Viewer, gateway: Gateway) -> Caller:
    """The viewer, as the gateway's runs know callers."""
    return Caller(
        rules=TranslationRules(models=gateway.models),
        tenant=viewer.tenant or "",
        key=viewer.name,
        operator=viewer.tenant is None,
    )


def json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON response that must not be cached."""
    headers = {"cache-control": "no-store", **(headers or {})}
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def refusal(problem: Problem) -> Answer:
    """A problem as the page reads it."""
    error = {"code": problem.code, "message": problem.message}
    return Answer(status=problem.status, body=msgspec.json.encode({"error": error}))


def refused(problem: Problem) -> Response:
    """The answer to a refused request."""
    answer = refusal(problem)
    headers = {k: v for k, v in asgi.headers_of(problem).items() if k != "www-authenticate"}
    return Response(answer.body, answer.status, headers, media_type=answer.media_type)


async def body_of(request: Request) -> dict[str, Any]:
    """The JSON object of a request; empty without a body. Raises Refusal (400, 413)."""
    gateway_request = await read_request(request, most_bytes=MAX_BODY)
    try:
        return msgspec.json.decode(gateway_request.body or b"{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        raise invalid(None, "the body is not a JSON object") from None


FOLDER = Path(__file__).parent / "static"
CSP = (
    "default-src 'self'; img-src 'self' blob:; style-src 'self'; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'self'; object-src 'none'"
)
SAFE_HEADERS = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
"""Of every answer of the console."""
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    ".json": "application/json",
    ".txt": "text/plain; charset=utf-8",
    "": "text/plain; charset=utf-8",
}


class _File(msgspec.Struct, frozen=True):
    stamp: tuple[int, int]
    etag: str
    content: bytes


class StaticFiles:
    """Serves the files of one folder. A changed file is read again."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder.resolve()
        self._files: dict[str, _File] = {}

    def answer(self, request: Request, path: str) -> Response:
        """The file, or 304 if the client has it. Raises Refusal (404)."""
        file, media_type = self._find(path)
        headers = {**SAFE_HEADERS, "etag": file.etag, "cache-control": "no-cache"}
        known = request.headers.get("if-none-match", "")
        if file.etag in (one.strip().removeprefix("W/") for one in known.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(file.content, headers=headers, media_type=media_type)

    def _find(self, path: str) -> tuple[_File, str]:
        parts = path.split("/")
        if any(part in ("", ".", "..") or part.startswith(".") or "\\" in part or "\0" in part for part in parts):
            raise _not_found()
        place = self._folder.joinpath(*parts)
        media_type = _TYPES.get(place.suffix)
        if media_type is None:
            raise _not_found()
        try:
            if not place.resolve().is_relative_to(self._folder) or not place.is_file():
                raise _not_found()
            stat = place.stat()
            stamp = (stat.st_mtime_ns, stat.st_size)
            file = self._files.get(path)
            if file is None or file.stamp != stamp:
                content = place.read_bytes()
                file = self._files[path] = _File(stamp, f'"{sha256(content).hexdigest()[:32]}"', content)
        except OSError:
            raise _not_found() from None
        return file, media_type


def _not_found() -> Refusal:
    return Refusal(Problem(status=404, code="not_found", message="no such file", kind="not_found"))
