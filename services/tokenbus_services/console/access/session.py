"""Logins and links: who a request to the console comes from.

A login is a cookie that any gateway of the deployment accepts, for as long as the server has its session: a logout
deletes that. The cookie names the key's id and one of its texts (by a part of the hash). The key's entry is looked up
with each request, so a login ends when its key is revoked, blocked or expires, or loses its roles. A link is a signed
text of the same kind, for one run.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterable
from hashlib import sha256
from hmac import compare_digest
from hmac import digest as hmac_digest
from typing import Protocol, TypeVar

import msgspec
from starlette.requests import Request

from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server, translated
from tokenbus_services.gateway.keys.directory import KeyDirectory
from tokenbus_services.gateway.keys.key import KeyEntry, digest
from tokenbus_services.gateway.problem import Problem, Refusal
from tokenbus_services.gateway.runs import not_found
from tokenbus_services.settings.tables.gateway import CONSOLE_ROLES, ConsoleRole, ConsoleSettings

COOKIE = "tokenbus_console"
PATH = "/console"
CSRF_HEADER = "x-console-csrf"
TICKET_HEADER = "x-console-ticket"
_KEY_PART = 16
"""Characters of the hash of a key's text that a cookie names."""


class Login(msgspec.Struct, frozen=True, array_like=True):
    """What a cookie says."""

    key: str
    text: str
    """The beginning of the hash of the key's text."""
    expires_ms: int
    nonce: str


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """What a link says."""

    run: str
    content: bool
    by: str | None
    """Id of the key that made it; None without keys."""
    expires_ms: int


class Logins(Protocol):
    """The logins that have not ended, by their nonces. All raise ServerError."""

    async def begin(self, nonce: str, *, lifetime_s: float) -> None: ...

    async def end(self, nonce: str) -> None: ...

    async def has(self, nonce: str) -> bool: ...


class StoredLogins:
    """Keys in Redis, one for each login."""

    def __init__(self, server: Server, keys: Keys) -> None:
        self._server = server
        self._keys = keys

    async def begin(self, nonce: str, *, lifetime_s: float) -> None:
        with translated(self._server):
            await self._server.client.set(self._keys.console_login(nonce), b"1", ex=max(1, round(lifetime_s)))

    async def end(self, nonce: str) -> None:
        with translated(self._server):
            await self._server.client.delete(self._keys.console_login(nonce))

    async def has(self, nonce: str) -> bool:
        with translated(self._server):
            return bool(await self._server.client.exists(self._keys.console_login(nonce)))


class ConsoleSessions:
    """Identifies the viewer of a request."""

    def __init__(
        self,
        settings: ConsoleSettings,
        signer: Signer,
        logins: Logins,
        directory: KeyDirectory | None,
        *,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        """``directory``: None at a gateway without keys."""
        self._settings = settings
        self._signer = signer
        self._logins = logins
        self._directory = directory
        self._now_ms = now_ms

    @property
    def needs_login(self) -> bool:
        """Whether viewers log in with a key."""
        return self._directory is not None

    async def viewer(self, request: Request) -> Viewer:
        """The viewer; `NOBODY` without a valid login or link. Raises ServerError if the keys cannot be read."""
        ticket = request.headers.get(TICKET_HEADER) or request.query_params.get("ticket")
        if ticket:
            return await self._by_ticket(ticket)
        if self._directory is None:
            return viewer_without_keys(self._settings)
        return await self._by_cookie(request.cookies.get(COOKIE, ""), self._directory)

    async def login(self, key: str) -> tuple[str, Viewer]:
        """The cookie for a key's text, and its viewer. Raises Refusal (401, 403)."""
        entry = await self._directory.find(key) if self._directory else None
        if entry is None:
            why = "the API key is missing or not valid"
            raise Refusal(Problem(status=401, code="invalid_api_key", message=why, kind="auth"))
        if entry.rules.blocked or not entry.rules.console:
            why = "this key may not use the console; its field `console` lists what it may do there"
            raise Refusal(Problem(status=403, code="no_console_roles", message=why, kind="auth"))
        expires = self._now_ms() + round(self._settings.session_hours * 3_600_000)
        login = Login(entry.id, digest(key)[:_KEY_PART], expires, secrets.token_urlsafe(18))
        await self._logins.begin(login.nonce, lifetime_s=self._settings.session_hours * 3600)
        return await self._signer.sign("login", login), viewer_of(entry)

    async def logout(self, request: Request) -> None:
        """End the login of this request on the server, also for copies of its cookie. Raises ServerError."""
        cookie = request.cookies.get(COOKIE, "")
        if cookie and (login := await self._signer.check("login", cookie, Login)):
            await self._logins.end(login.nonce)

    async def ticket(self, viewer: Viewer, run: str) -> tuple[str, int]:
        """A link's text for this run, and the time at which it expires, in ms."""
        expires = self._now_ms() + round(self._settings.ticket_minutes * 60_000)
        ticket = Ticket(run, viewer.may("see_content"), viewer.name, expires)
        return await self._signer.sign("ticket", ticket), expires

    async def csrf(self, request: Request) -> str:
        """The token that a page sends with each action: of this login, or of this deployment without one."""
        return await self._signer.token("csrf", request.cookies.get(COOKIE, ""))

    async def csrf_of(self, cookie: str) -> str:
        """The token that belongs to this cookie."""
        return await self._signer.token("csrf", cookie)

    async def check_csrf(self, request: Request) -> None:
        """Raise Refusal (403) if the request does not come from a page of the console."""
        given = request.headers.get(CSRF_HEADER, "")
        if not compare_digest(given.encode(), (await self.csrf(request)).encode()):
            why = f"the header {CSRF_HEADER} is missing or of another login: load the page again"
            raise Refusal(Problem(status=403, code="csrf", message=why, kind="auth"))

    async def _by_cookie(self, cookie: str, directory: KeyDirectory) -> Viewer:
        login = await self._signer.check("login", cookie, Login) if cookie else None
        if login is None or login.expires_ms <= self._now_ms() or not await self._logins.has(login.nonce):
            return NOBODY
        entry = await directory.entry(login.key)
        return viewer_of(entry) if entry and self._is_valid(entry, login.text) else NOBODY

    async def _by_ticket(self, text: str) -> Viewer:
        ticket = await self._signer.check("ticket", text, Ticket)
        if ticket is None or ticket.expires_ms <= self._now_ms():
            why = "this link has expired: ask for a new one, or log in"
            raise Refusal(Problem(status=401, code="ticket_expired", message=why, kind="auth"))
        if (maker := await self._maker(ticket)) is None:
            why = "the key that made this link is not valid any more"
            raise Refusal(Problem(status=401, code="ticket_expired", message=why, kind="auth"))
        roles = {"see_runs", "see_content"} if ticket.content and maker.may("see_content") else {"see_runs"}
        return Viewer(
            name=ticket.by,
            roles=frozenset(role for role in maker.roles if role in roles),
            tenant=maker.tenant,
            run=ticket.run,
        )

    async def _maker(self, ticket: Ticket) -> Viewer | None:
        """The viewer that made a link, as the settings and the key are now."""
        if self._directory is None:
            return viewer_without_keys(self._settings) if ticket.by is None else None
        entry = await self._directory.entry(ticket.by) if ticket.by is not None else None
        if entry is None or not self._is_valid(entry, None):
            return None
        return viewer_of(entry)

    def _is_valid(self, entry: KeyEntry, text: str | None) -> bool:
        """Whether one of the client's keys is valid: that with this hash, or any."""
        now = self._now_ms()
        return (
            entry.revoked_ms is None
            and not entry.rules.blocked
            and any(
                one.is_valid(now) and (text is None or compare_digest(one.sha256[:_KEY_PART], text))
                for one in entry.secrets
            )
        )


# Who looks at the console, and what they may do. Pure.


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
    roles = with_implied(role for role in entry.rules.console if role != "decide" or entry.rules.approve)
    sees_all = entry.rules.operator or "admin" in roles
    return Viewer(name=entry.id, roles=roles, tenant=None if sees_all else entry.rules.tenant or entry.id)


def listed(viewer: Viewer) -> list[ConsoleRole]:
    """The viewer's roles in a fixed order."""
    return [role for role in CONSOLE_ROLES if viewer.may(role)]


_SECRET_BYTES = 32
_SIGNATURE_BYTES = 32
_READ_AGAIN_S = 5.0
MAX_TEXT = 2048

S = TypeVar("S", bound=msgspec.Struct)


class SecretSource(Protocol):
    """Source of the deployment's secret."""

    async def read(self) -> bytes:
        """The secret. Raises ServerError."""
        ...


class StoredSecret:
    """Random bytes in Redis, made by the first gateway that needs them."""

    def __init__(self, server: Server, keys: Keys) -> None:
        self._server = server
        self._key = keys.console_secret

    async def read(self) -> bytes:
        with translated(self._server, self._key):
            await self._server.client.set(self._key, secrets.token_bytes(_SECRET_BYTES), nx=True)
            found: bytes | None = await self._server.client.get(self._key)
        assert found is not None
        return found


class Signer:
    """Signs small structs. A text is for one purpose alone, its ``kind``."""

    def __init__(self, source: SecretSource) -> None:
        self._source = source
        self._secret = b""
        self._read_at = 0.0
        self._reading = asyncio.Lock()

    async def sign(self, kind: str, value: msgspec.Struct) -> str:
        """The value as a text that `check` accepts. Raises ServerError if the secret cannot be read."""
        body = msgspec.msgpack.encode(value)
        return _text(body + await self._signature(kind, body))

    async def check(self, kind: str, text: str, of: type[S]) -> S | None:
        """The value in a signed text; None if it was not signed here, or for another purpose.

        Raises ServerError if the secret cannot be read.
        """
        data = _bytes(text)
        if data is None or len(data) <= _SIGNATURE_BYTES:
            return None
        body, given = data[:-_SIGNATURE_BYTES], data[-_SIGNATURE_BYTES:]
        matches = compare_digest(given, await self._signature(kind, body))
        if not matches and await self._read_again():  # the server came back empty, and another gateway made a new one
            matches = compare_digest(given, await self._signature(kind, body))
        if not matches:
            return None
        try:
            return msgspec.msgpack.decode(body, type=of)
        except msgspec.DecodeError:
            return None  # of another version

    async def token(self, kind: str, text: str) -> str:
        """A short text that only this deployment can derive from ``text``."""
        return _text((await self._signature(kind, text.encode()))[:18])

    async def _signature(self, kind: str, body: bytes) -> bytes:
        if not self._secret:
            await self._read_again()
        return hmac_digest(self._secret, kind.encode() + b"\0" + body, sha256)

    async def _read_again(self) -> bool:
        """Read the secret, unless that was a moment ago; returns whether it is another one now."""
        async with self._reading:
            now, before = time.monotonic(), self._secret
            if before and now - self._read_at < _READ_AGAIN_S:
                return False
            self._secret = await self._source.read()
            self._read_at = now
            return self._secret != before


def _text(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


def _bytes(text: str) -> bytes | None:
    if len(text) > MAX_TEXT or not text.isascii():
        return None
    try:
        return urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except ValueError:
        return None
