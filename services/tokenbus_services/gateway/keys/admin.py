"""The admin API: makes, lists, rotates and revokes keys, on a port of its own, with a token of its own."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

import msgspec
import structlog
import uvicorn
from msgspec import Meta
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tokenbus.bus.audit import audit
from tokenbus.bus.liveness import Liveness, beat
from tokenbus.bus.server.server import Server, translated
from tokenbus.errors import ServerError, SettingsError
from tokenbus.secret_env import Secret
from tokenbus_services.blobs.auth import admitted, secret_of
from tokenbus_services.gateway.budgets.spend import read_spend
from tokenbus_services.gateway.keys.directory import entry_of, summary
from tokenbus_services.gateway.keys.key import KeyEntry
from tokenbus_services.gateway.keys.store import KeyNotFound, KeyStore
from tokenbus_services.net.http_server import HttpBounds, server_config
from tokenbus_services.settings import Settings
from tokenbus_services.settings.tables.gateway import AdminSettings, KeyRules

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

MAX_BODY = 256 * 1024
_GRACE_S = 2
_DAY_S = 86_400.0
Seconds = Annotated[float, Meta(gt=0, le=100 * 365 * _DAY_S)]
T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]


class CreateKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /keys`."""

    name: Annotated[str, Meta(max_length=256)] = ""
    duration_s: Seconds | None = None
    """Lifetime of the key; None: without end."""
    rules: KeyRules = KeyRules()


class RotateKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /keys/ID/rotate`."""

    grace_s: Annotated[float, Meta(ge=0, le=365 * _DAY_S)] = _DAY_S
    """How long earlier keys of the client are valid from now on."""
    duration_s: Seconds | None = None


class AdminServer:
    """The API and its HTTP server."""

    def __init__(
        self, settings: Settings, admin: AdminSettings, server: Server, store: KeyStore, env: Mapping[str, str]
    ) -> None:
        """Raises SettingsError if there is no token."""
        self._admin = admin
        self._token = secret_of(admin.token_env, env)
        if not self._token:
            problem = "not set, so the admin API of the gateway would be open: set a long random text there"
            raise SettingsError("environment", admin.token_env, problem)
        app = AdminApi(settings, server, store, self._token).app()
        self._server = _Server(server_config(app, HttpBounds(connections=64), grace_s=_GRACE_S))
        self._serving: asyncio.Task[None] | None = None

    async def open(self, liveness: Liveness) -> None:
        """Listen. Raises SettingsError if the address is not available."""
        host, port = self._admin.host, self._admin.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, port), family=family)
        except OSError as e:
            raise SettingsError("settings", "gateway.admin.port", f"{host}:{port}: {e.strerror or e}") from None
        log.info("admin_api", host=host, port=listener.getsockname()[1])
        self._serving = liveness.start(self._server.serve(sockets=[listener]), name="admin API")

    async def close(self) -> None:
        self._server.should_exit = True
        if self._serving:
            Liveness.expect_end(self._serving)
            await asyncio.gather(self._serving, return_exceptions=True)


class AdminApi:
    def __init__(self, settings: Settings, server: Server, store: KeyStore, token: Secret) -> None:
        assert settings.gateway
        self._keys = settings.keys
        self._server = server
        self._store = store
        self._token = token
        self._fixed = {name: entry_of(name, key) for name, key in settings.gateway.keys.items()}
        """Entries of the settings, which are changed there alone."""

    def app(self) -> Starlette:
        routes = [
            Route("/keys", self._guarded(self._create), methods=["POST"]),
            Route("/keys", self._guarded(self._list), methods=["GET"]),
            Route("/keys/{key_id}", self._guarded(self._show), methods=["GET"]),
            Route("/keys/{key_id}", self._guarded(self._change), methods=["PUT"]),
            Route("/keys/{key_id}", self._guarded(self._revoke), methods=["DELETE"]),
            Route("/keys/{key_id}/rotate", self._guarded(self._rotate), methods=["POST"]),
        ]
        handlers: Any = {HTTPException: _no_route, Exception: _defect}
        return Starlette(routes=routes, exception_handlers=handlers)

    async def _create(self, request: Request) -> Response:
        body = await _body(request, CreateKey)
        made = await self._store.create(body.rules, name=body.name, lifetime_s=body.duration_s)
        await self._changed("keys.create", made.id, name=body.name or None)
        log.info("key_created", key=made.id, tenant=body.rules.tenant)
        return _json({"key": made.text, **await self._shown(await self._entry(made.id))}, 201)

    async def _list(self, request: Request) -> Response:
        entries = [*self._fixed.values(), *await self._store.all()]
        return _json({"keys": [await self._shown(entry) for entry in entries]})

    async def _show(self, request: Request) -> Response:
        entry = await self._entry(request.path_params["key_id"])
        [spend] = await read_spend(self._server, self._keys, [entry.id])
        return _json({**await self._shown(entry), "spend": msgspec.to_builtins(spend)})

    async def _change(self, request: Request) -> Response:
        rules = await _body(request, KeyRules)
        key_id = request.path_params["key_id"]
        entry = await self._store.change(key_id, lambda entry: msgspec.structs.replace(entry, rules=rules))
        await self._changed("keys.change", key_id)
        log.info("key_changed", key=key_id)
        return _json(await self._shown(entry))

    async def _rotate(self, request: Request) -> Response:
        body = await _body(request, RotateKey)
        key_id = request.path_params["key_id"]
        made = await self._store.rotate(key_id, grace_s=body.grace_s, lifetime_s=body.duration_s)
        await self._changed("keys.rotate", key_id)
        log.info("key_rotated", key=key_id)
        return _json({"key": made.text, **await self._shown(await self._entry(key_id))}, 201)

    async def _revoke(self, request: Request) -> Response:
        entry = await self._store.revoke(request.path_params["key_id"])
        await self._changed("keys.revoke", entry.id)
        log.info("key_revoked", key=entry.id)
        return _json(await self._shown(entry))

    async def _changed(self, action: str, key_id: str, **facts: object) -> None:
        """Enter what was done to a key in the audit, as commands do."""
        with translated(self._server):
            await audit(self._server, self._keys, action, by="admin token", door="admin", key=key_id, **facts)

    async def _entry(self, key_id: str) -> KeyEntry:
        entry = self._fixed.get(key_id) or await self._store.find(key_id)
        if entry is None:
            raise KeyNotFound(key_id)
        return entry

    async def _shown(self, entry: KeyEntry) -> dict[str, Any]:
        source = "settings" if entry.id in self._fixed else "redis"
        return msgspec.to_builtins(summary(entry, source=source, now_ms=await self._store.now_ms()))

    def _guarded(self, handle: Handler) -> Handler:
        async def endpoint(request: Request) -> Response:
            if not admitted(request.headers.get("authorization", "").encode("latin-1"), self._token):
                return _problem(401, "unauthorized", "the admin token is missing or not valid")
            try:
                return await handle(request)
            except msgspec.ValidationError as e:
                return _problem(400, "invalid_request", str(e))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                return _problem(400, "invalid_request", "the body is not a JSON object")
            except KeyNotFound as e:
                return _problem(404, e.code, str(e))
            except ServerError as e:
                return _problem(503, e.code, str(e))

        return endpoint


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _problem(error.status_code, "not_found" if error.status_code == 404 else "http_error", error.detail)


async def _defect(request: Request, error: Exception) -> Response:
    return _problem(500, "gateway_error", f"the gateway failed ({type(error).__name__})")


async def _body(request: Request, kind: type[T]) -> T:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY:
            raise msgspec.ValidationError(f"the body has more than {MAX_BODY} bytes")
    return msgspec.json.decode(bytes(body) or b"{}", type=kind)


def _json(value: dict[str, Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, {"cache-control": "no-store"}, media_type="application/json")


def _problem(status: int, code: str, message: str) -> Response:
    return _json({"error": {"code": code, "message": message}}, status)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the gateway stops it."""

    async def on_tick(self, counter: int) -> bool:
        beat()
        return await super().on_tick(counter)

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield
