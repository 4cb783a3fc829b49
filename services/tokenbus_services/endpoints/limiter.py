"""This process's share of the deployment-wide limits: reserves what a call needs, keeps it alive, and refunds it.

Reservations are leases that a heartbeat renews. If a process is killed, its slots are free again within `LEASE_S`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from uuid import uuid4

import msgspec
import structlog
from redis.exceptions import RedisError

from tokenbus.bus.keys import Keys
from tokenbus.bus.liveness import Liveness, rest, stop_task
from tokenbus.bus.scripts import ScriptCall
from tokenbus.bus.scripts import limits as scripts
from tokenbus.bus.scripts.limits import Kind, Scope
from tokenbus.bus.server.retry import Defects, retry_until_available
from tokenbus.bus.server.run_scripts import run_script, run_scripts
from tokenbus.bus.server.server import Server
from tokenbus.events.quirks import model_key, names_model
from tokenbus_services.settings import LimitSettings, RateSettings

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

LEASE_S = 8.0
HEARTBEAT_S = 2.0
LONGEST_PAUSE_S = 60.0
"""Longest pause that a provider's Retry-After can cause; after it the provider is tried again."""
MEMBERS_PER_CALL = 500


class ReservationRequest(msgspec.Struct, frozen=True, eq=False):
    """A call to reserve: its name and the limits that apply."""

    call: str
    tenant: str
    scopes: tuple[Scope, ...]
    tokens: int
    provider: str = ""
    token: str = msgspec.field(default_factory=lambda: uuid4().hex[:12])
    """Unique per reservation request. Two fetchers may ask for the same attempt, if the first was taken for dead
    while it waited. When it wakes and leaves, the second one's slot stays.
    """

    @property
    def member(self) -> str:
        return f"{self.call}/{self.token}"


class Reservation(msgspec.Struct, frozen=True, eq=False):
    """Permission to make the call."""

    request: ReservationRequest
    tokens_until: tuple[int, ...]
    """Per scope: the time until which its tokens are taken."""


class LimitRefusal(msgspec.Struct, frozen=True):
    """Refused by this scope; asking again is pointless for ``seconds``."""

    scope: Scope
    seconds: float


class Limiter:
    """Call `open`, and `close` when no call is running."""

    def __init__(self, server: Server, *, worker: str, liveness: Liveness | None = None) -> None:
        self._server = server
        self._liveness = liveness or Liveness()
        self._worker = worker
        self._running: dict[Scope, set[str]] = {}
        """Running calls by scope, if the scope limits concurrency."""
        self._heartbeat: asyncio.Task[None] | None = None
        self._sending: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Start renewing leases."""
        self._heartbeat = self._liveness.start(self._run_heartbeat(), name="limits")

    async def close(self) -> None:
        """Send outstanding refunds and stop."""
        await asyncio.gather(*self._sending)
        await stop_task(self._heartbeat)

    async def reserve(self, request: ReservationRequest) -> Reservation | LimitRefusal:
        """Reserve in all of the call's scopes, or in none. Sends no command if there are no scopes."""
        if not request.scopes:
            return Reservation(request, ())
        lease_ms = round(LEASE_S * 1000)
        call = scripts.reserve(
            request.scopes, member=request.member, worker=self._worker, tokens=request.tokens, lease_ms=lease_ms
        )
        reply = await retry_until_available(self._server, lambda: run_script(self._server, call), what="limits")
        if reply[0] == b"wait":
            return LimitRefusal(request.scopes[int(reply[1]) - 1], int(reply[2]) / 1000)
        for scope in request.scopes:
            if scope.concurrency:
                self._running.setdefault(scope, set()).add(request.member)
        return Reservation(request, tuple(int(until) for until in reply[1:]))

    async def reserve_within(self, request: ReservationRequest, seconds: float) -> Reservation | LimitRefusal:
        """As `reserve`. While there is no room it asks again, for at most so long."""
        until = asyncio.get_running_loop().time() + seconds
        while True:
            verdict = await self.reserve(request)
            left_s = until - asyncio.get_running_loop().time()
            if isinstance(verdict, Reservation) or verdict.seconds > left_s:
                return verdict
            await asyncio.sleep(verdict.seconds)

    def refund(self, reservation: Reservation, used: int | None) -> None:
        """End the call, which took ``used`` tokens (None: unknown, and the estimate counts)."""
        request = reservation.request
        if not request.scopes:
            return
        for scope in request.scopes:
            if members := self._running.get(scope):
                members.discard(request.member)
                if not members:
                    del self._running[scope]
        left = 0 if used is None else request.tokens - used
        self._later(scripts.refund(request.scopes, member=request.member, left=left, taken=reservation.tokens_until))

    def pause(self, request: ReservationRequest, seconds: float) -> None:
        """Pause all fetchers' calls of this provider and model, as the provider asked."""
        ms = round(min(seconds, LONGEST_PAUSE_S) * 1000)
        for scope in request.scopes:
            if scope.kind == "model" and ms > 0:
                log.info("provider_paused", scope=scope.key, ms=ms)
                self._later(scripts.pause(scope.key, ms=ms))

    def _later(self, call: ScriptCall) -> None:
        # In its own task: the caller may be cancelled at any moment and must not wait for the server.
        task = asyncio.create_task(self._send_once(call), name="limits")
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _send_once(self, call: ScriptCall) -> None:
        try:
            await run_script(self._server, call)
        except (RedisError, OSError) as e:
            # Do not retry: it may have arrived. Reserved tokens flow back with time, and the slot's lease expires.
            log.warning("refund_failed", error=str(e))

    async def _run_heartbeat(self) -> None:
        defects = Defects()
        while True:
            await rest(HEARTBEAT_S)
            calls = [
                scripts.renew(scope.held, lease_ms=round(LEASE_S * 1000), members=part)
                for scope, members in self._running.items()
                for part in _parts(sorted(members))
            ]
            try:
                await run_scripts(self._server, calls)
                defects.none()
            except Exception as e:  # keep renewing after any error: otherwise running calls would lose their slots
                log.warning("limit_leases_not_renewed", error=str(e) or type(e).__name__)
                defects.count(e)


def _parts(members: Sequence[str]) -> list[Sequence[str]]:
    return [members[i : i + MEMBERS_PER_CALL] for i in range(0, len(members), MEMBERS_PER_CALL)]


_NONE = RateSettings()


class Scopes:
    """The limits of a deployment."""

    def __init__(self, settings: LimitSettings, keys: Keys) -> None:
        self._settings = settings
        self._keys = keys
        self._tenants = {name.strip(): rates for name, rates in settings.tenants.items()}

    def of(self, provider: str, model: str, tenant: str) -> tuple[Scope, ...]:
        """Return the scopes of a call. Empty if nothing is limited, so that the server need not be asked.

        A provider with a settings table always has its model's scope too, because a provider's pause is stored there.
        """
        scopes: list[Scope] = []
        if (limits := self._settings.providers.get(provider)) is not None:
            name, rates = _of_model(limits.models, model)
            scopes.append(self._scope("model", f"{_quoted(provider).replace('/', '%2F')}/{_quoted(name)}", rates))
            if _limits(limits):
                scopes.append(self._scope("provider", _quoted(provider), limits))
        rates = self._tenants.get(tenant, self._settings.tenant)
        if rates is not None and _limits(rates):
            scopes.append(self._scope("tenant", _quoted(tenant), rates))
        return tuple(scopes)

    def _scope(self, kind: Kind, name: str, rates: RateSettings) -> Scope:
        return Scope(
            kind,
            self._keys.limit(f"{kind}:{name}"),
            rates.requests_per_second or 0.0,
            rates.tokens_per_minute or 0,
            rates.concurrency or 0,
        )


def _of_model(models: dict[str, RateSettings], model: str) -> tuple[str, RateSettings]:
    """The table entry for the model: its exact name first, then the longest matching prefix."""
    named = [name for name in models if names_model(name, model)]
    if not named:
        return model_key(model), _NONE
    name = max(named, key=lambda name: (not name.endswith("*"), len(name)))
    return name, models[name]


def _quoted(name: str) -> str:
    """Escape an arbitrary name for use in a key; keys of this project may end in `:held`."""
    return name.replace("%", "%25").replace(":", "%3A")


def _limits(rates: RateSettings) -> bool:
    return any((rates.requests_per_second, rates.tokens_per_minute, rates.concurrency))
