"""Logins and links: when they end, and that they cannot be forged."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.requests import Request

from tokenbus_services.console.access.session import COOKIE, NOBODY, TICKET_HEADER, ConsoleSessions, Signer, Viewer
from tokenbus_services.console.routes.session import (
    LOGINS_OF_ACCOUNT,
    LOGINS_OF_ADDRESS,
    LOGINS_PER_MINUTE,
    LoginFailures,
)
from tokenbus_services.gateway.keys.directory import entry_of
from tokenbus_services.gateway.keys.key import KeyEntry, new_key
from tokenbus_services.gateway.problem import Refusal
from tokenbus_services.settings import ConsoleSettings
from tokenbus_services.settings.tables.gateway import KeySettings

KEY, NEXT = new_key(), new_key()
START_MS = 1_800_000_000_000


class Secret:
    def __init__(self, secret: bytes = b"x" * 32) -> None:
        self.secret = secret

    async def read(self) -> bytes:
        return self.secret


class Keys:
    """A directory whose one entry the test changes."""

    def __init__(self, **rules: Any) -> None:
        self.change(**rules)

    def change(self, sha256: tuple[str, ...] = (KEY.sha256,), **rules: Any) -> None:
        self.now: KeyEntry | None = entry_of("ada", KeySettings(sha256=sha256, **rules))

    async def find(self, text: str) -> KeyEntry | None:
        return self.now if self.now and self.now.opens(text, START_MS) else None

    async def entry(self, key_id: str) -> KeyEntry | None:
        return self.now if key_id == "ada" else None


class Clock:
    now_ms = START_MS

    def __call__(self) -> int:
        return self.now_ms


class Open(set[str]):
    """The logins that have not ended."""

    async def begin(self, nonce: str, *, lifetime_s: float) -> None:
        self.add(nonce)

    async def end(self, nonce: str) -> None:
        self.discard(nonce)

    async def has(self, nonce: str) -> bool:
        return nonce in self


@pytest.fixture
def logins() -> Open:
    return Open()


@pytest.fixture
def keys() -> Keys:
    return Keys(console=("see_content", "act"), tenant="acme")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sessions(keys: Any, logins: Open, clock: Clock) -> ConsoleSessions:
    return ConsoleSessions(ConsoleSettings(), Signer(Secret()), logins, keys, now_ms=clock)


def request(cookie: str = "", **headers: str) -> Request:
    given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    given += [(b"cookie", f"{COOKIE}={cookie}".encode())] if cookie else []
    return Request({"type": "http", "method": "GET", "path": "/", "headers": given, "query_string": b""})


def ticket_of(text: str) -> Request:
    return request(**{TICKET_HEADER.replace("-", "_"): text})


async def test_any_gateway_accepts_a_login_that_another_signed(
    sessions: ConsoleSessions, logins: Open, keys: Any
) -> None:
    cookie, viewer = await sessions.login(KEY.text)
    other = ConsoleSessions(ConsoleSettings(), Signer(Secret()), logins, keys, now_ms=Clock())
    assert await other.viewer(request(cookie)) == viewer
    assert (viewer.tenant, viewer.roles) == ("acme", {"see_runs", "see_content", "act"})


async def test_a_changed_cookie_and_one_of_another_deployment_are_rejected(
    sessions: ConsoleSessions, keys: Any
) -> None:
    cookie, _ = await sessions.login(KEY.text)
    stranger = ConsoleSessions(ConsoleSettings(), Signer(Secret(b"y" * 32)), Open(), keys, now_ms=Clock())
    foreign, _ = await stranger.login(KEY.text)
    ticket, _ = await sessions.ticket(Viewer(name="ada", roles=frozenset({"see_runs"})), "r")
    for wrong in (cookie[:-2] + "AA", "A" + cookie[1:], foreign, ticket, "", "é", "A" * 5000):
        if wrong.isascii():
            assert await sessions.viewer(request(wrong)) == NOBODY, wrong


@pytest.mark.parametrize(
    "rules",
    [
        {"console": ("see_runs",), "blocked": True},
        {"console": ()},
        {"console": ("see_runs",), "sha256": (NEXT.sha256,)},
    ],
    ids=["blocked", "without roles", "another text"],
)
async def test_a_login_ends_with_its_key(sessions: ConsoleSessions, keys: Keys, rules: dict[str, Any]) -> None:
    cookie, _ = await sessions.login(KEY.text)
    keys.change(**rules)
    assert not (await sessions.viewer(request(cookie))).roles
    keys.now = None
    assert await sessions.viewer(request(cookie)) == NOBODY


async def test_a_logout_ends_its_own_login_for_every_copy_of_the_cookie(sessions: ConsoleSessions) -> None:
    cookie, _ = await sessions.login(KEY.text)
    other, viewer = await sessions.login(KEY.text)
    await sessions.logout(request(cookie[:-2] + "AA"))
    assert await sessions.viewer(request(cookie)) == viewer
    await sessions.logout(request(cookie))
    assert await sessions.viewer(request(cookie)) == NOBODY
    assert await sessions.viewer(request(other)) == viewer


async def test_a_login_ends_in_time(sessions: ConsoleSessions, clock: Clock) -> None:
    cookie, _ = await sessions.login(KEY.text)
    clock.now_ms += 12 * 3_600_000 - 1
    assert (await sessions.viewer(request(cookie))).roles
    clock.now_ms += 1
    assert await sessions.viewer(request(cookie)) == NOBODY


async def test_a_changed_role_holds_at_once(sessions: ConsoleSessions, keys: Keys) -> None:
    cookie, _ = await sessions.login(KEY.text)
    keys.change(console=("admin",), tenant="acme")
    viewer = await sessions.viewer(request(cookie))
    assert (viewer.roles, viewer.tenant) == ({"see_runs", "admin"}, None)


async def test_a_link_shows_what_its_maker_may_see_now_for_some_minutes(
    sessions: ConsoleSessions, keys: Keys, clock: Clock
) -> None:
    _, maker = await sessions.login(KEY.text)
    ticket, expires_ms = await sessions.ticket(maker, "run-1")
    assert expires_ms == START_MS + 15 * 60_000
    guest = await sessions.viewer(ticket_of(ticket))
    assert (guest.run, guest.tenant, guest.roles) == ("run-1", "acme", {"see_runs", "see_content"})
    with pytest.raises(Refusal):
        guest.check_run("run-2")
    keys.change(console=("see_runs",), tenant="acme")
    assert (await sessions.viewer(ticket_of(ticket))).roles == {"see_runs"}
    keys.now = None
    with pytest.raises(Refusal, match="not valid any more"):
        await sessions.viewer(ticket_of(ticket))
    keys.change(console=("see_runs",), tenant="acme")
    clock.now_ms = expires_ms
    with pytest.raises(Refusal, match="expired"):
        await sessions.viewer(ticket_of(ticket))


async def test_the_pages_token_is_of_its_login(sessions: ConsoleSessions) -> None:
    cookie, _ = await sessions.login(KEY.text)
    token = await sessions.csrf(request(cookie))
    await sessions.check_csrf(request(cookie, x_console_csrf=token))
    for wrong in ("", await sessions.csrf(request()), token[:-1] + ("A" if token[-1] != "A" else "B")):
        with pytest.raises(Refusal):
            await sessions.check_csrf(request(cookie, x_console_csrf=wrong))


async def test_without_keys_all_callers_have_the_roles_of_the_settings() -> None:
    sessions = ConsoleSessions(ConsoleSettings(), Signer(Secret()), Open(), None)
    assert not sessions.needs_login
    assert (await sessions.viewer(request())).roles == {"see_runs", "act"}
    none = ConsoleSessions(ConsoleSettings(roles_without_keys=()), Signer(Secret()), Open(), None)
    assert await none.viewer(request()) == NOBODY


def test_who_guesses_is_refused_for_the_rest_of_the_minute_by_account_and_by_address() -> None:
    now = 30.0

    def refused(failures: LoginFailures, address: str, account: str | None) -> int:
        """After how many failures the next one is refused."""
        for n in range(1000):
            try:
                failures.check(address, account)
            except Refusal:
                return n
            failures.count(address, account)
        return -1

    failures = LoginFailures(clock=lambda: now)
    assert refused(failures, "192.0.2.1", "ada") == LOGINS_PER_MINUTE
    failures.check("192.0.2.1", "bob")  # another account behind the same proxy
    failures.check("192.0.2.2", "ada")  # the account's owner elsewhere
    accounts = [refused(failures, "192.0.2.1", f"guess{n}") for n in range(10)]
    assert sum(accounts) == LOGINS_OF_ADDRESS - LOGINS_PER_MINUTE
    addresses = [refused(failures, f"192.0.2.{n}", "ada") for n in range(2, 20)]
    assert sum(addresses) == LOGINS_OF_ACCOUNT - LOGINS_PER_MINUTE
    assert refused(failures, "192.0.2.99", None) == LOGINS_PER_MINUTE
    now = 61.0
    failures.check("192.0.2.1", "ada")
