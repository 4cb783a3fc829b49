"""Routes: login and logout, what the viewer may do, and links for colleagues."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from tokenbus import __version__
from tokenbus_services.console.access.session import COOKIE, NOBODY, PATH, Viewer, listed
from tokenbus_services.console.http import Desk, body_of, caller_of, json
from tokenbus_services.gateway.keys.key import id_of
from tokenbus_services.gateway.problem import Problem, Refusal, invalid
from tokenbus_services.settings.tables.gateway import ConsoleSettings

LOGINS_PER_MINUTE = 10
"""Refused logins of one account from one address; further ones are refused without a look at the key."""
LOGINS_OF_ADDRESS = 60
"""Those from one address."""
LOGINS_OF_ACCOUNT = 100
"""Those of one account."""
_MAX_COUNTS = 30_000


def routes(desk: Desk, settings: ConsoleSettings, currency: str) -> list[BaseRoute]:
    parts = _SessionRoutes(desk, settings, currency)
    return [
        Route(f"{PATH}/api/session", desk.open(parts.session), methods=["GET"]),
        Route(f"{PATH}/api/login", desk.open(parts.login), methods=["POST"]),
        Route(f"{PATH}/api/logout", desk.open(parts.logout), methods=["POST"]),
        Route(f"{PATH}/api/tickets", desk.action("see_runs", parts.ticket), methods=["POST"]),
    ]


class _SessionRoutes:
    def __init__(self, desk: Desk, settings: ConsoleSettings, currency: str) -> None:
        self._desk = desk
        self._settings = settings
        self._currency = currency
        self._failures = LoginFailures()

    async def session(self, request: Request) -> Response:
        viewer = await self._desk.sessions.viewer(request)
        return json(self._shown(viewer, await self._desk.sessions.csrf(request)))

    async def login(self, request: Request) -> Response:
        await self._desk.sessions.check_csrf(request)
        address = request.client.host if request.client else ""  # as the connection has it, no header
        body = await body_of(request)
        key = body.get("key")
        if not isinstance(key, str) or not key or not key.isprintable():
            raise invalid("key", "must be the text of a key")
        account = id_of(key.strip(" "))
        self._failures.check(address, account)
        try:
            cookie, viewer = await self._desk.sessions.login(key.strip(" "))
        except Refusal as e:
            self._failures.count(address, account)
            self._desk.log("login_refused", NOBODY, code=e.problem.code)
            raise
        request.state.caller = caller_of(viewer, self._desk.gateway)
        self._desk.log("login", viewer)
        answer = json(self._shown(viewer, await self._desk.sessions.csrf_of(cookie)))
        lifetime = round(self._settings.session_hours * 3600)
        answer.set_cookie(
            COOKIE, cookie, max_age=lifetime, path=PATH, secure=_is_https(request), httponly=True, samesite="strict"
        )
        return answer

    async def logout(self, request: Request) -> Response:
        viewer = await self._desk.sessions.viewer(request)
        await self._desk.sessions.check_csrf(request)
        await self._desk.sessions.logout(request)
        self._desk.log("logout", viewer)
        answer = json(self._shown(NOBODY, await self._desk.sessions.csrf_of("")))
        answer.delete_cookie(COOKIE, path=PATH, secure=_is_https(request), httponly=True, samesite="strict")
        return answer

    async def ticket(self, request: Request, viewer: Viewer) -> Response:
        body = await body_of(request)
        run, seq = body.get("run"), body.get("seq")
        if not isinstance(run, str) or not run:
            raise invalid("run", "must be the id of a run")
        if seq is not None and (not isinstance(seq, int) or isinstance(seq, bool) or seq < 0):
            raise invalid("seq", "must be the seq of an event")
        run = (await self._desk.gateway.runs.owned(run, caller_of(viewer, self._desk.gateway))).id
        text, expires_ms = await self._desk.sessions.ticket(viewer, run)
        self._desk.log("ticket", viewer, run=run)
        place = f"run={quote(run, safe='')}" + ("" if seq is None else f"&seq={seq}")
        return json({"url": f"{PATH}/#{place}&ticket={text}", "expires_at": expires_ms})

    def _shown(self, viewer: Viewer, csrf: str) -> dict[str, Any]:
        return {
            "name": viewer.name,
            "roles": listed(viewer),
            "login": self._desk.sessions.needs_login,
            "tenant": viewer.tenant,
            "run": viewer.run,
            "csrf": csrf,
            "version": __version__,
            "currency": self._currency,
        }


class LoginFailures:
    """Slows down those who guess: to spare the server, for a key has 256 random bits.

    Failures are counted for each account at an address, for each address, and for each account. A proxy's address is
    that of all its users, and an account's id is no secret. So the limit of either alone is higher: a stranger's
    failures do not soon lock out anybody else.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: OrderedDict[tuple[str | None, str | None], tuple[int, int]] = OrderedDict()
        """By address and account: the minute, and the failures in it."""

    def check(self, address: str, account: str | None) -> None:
        """Raise Refusal (429) if there were too many failures in this minute."""
        now = self._clock()
        for who, most in _limits(address, account):
            minute, count = self._counts.get(who, (0, 0))
            if minute == int(now // 60) and count >= most:
                why = "too many refused logins from this address or with this key's id: wait a minute"
                wait_s = 60 - now % 60
                raise Refusal(
                    Problem(status=429, code="too_many_logins", message=why, kind="rate_limit", retry_after_s=wait_s)
                )

    def count(self, address: str, account: str | None) -> None:
        now = int(self._clock() // 60)
        for who, _ in _limits(address, account):
            minute, count = self._counts.get(who, (now, 0))
            self._counts[who] = (now, count + 1 if minute == now else 1)
            self._counts.move_to_end(who)
        while len(self._counts) > _MAX_COUNTS:
            self._counts.popitem(last=False)


def _limits(address: str, account: str | None) -> list[tuple[tuple[str | None, str | None], int]]:
    """What a login counts for, with the limit of each. ``account``: None for what is no key."""
    if account is None:
        return [((address, None), LOGINS_PER_MINUTE)]
    return [
        ((address, account), LOGINS_PER_MINUTE),
        ((address, None), LOGINS_OF_ADDRESS),
        ((None, account), LOGINS_OF_ACCOUNT),
    ]


def _is_https(request: Request) -> bool:
    """Whether the browser used https, here or at a proxy."""
    return request.url.scheme == "https" or request.headers.get("x-forwarded-proto", "").startswith("https")
