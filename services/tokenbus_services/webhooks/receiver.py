"""One receiver of webhooks: signs and posts what waits for it, and tries again what failed.

Each receiver has its own list and its own tries at once, so one that is slow or away delays no other.
"""

from __future__ import annotations

import asyncio
import binascii
import hmac
import random
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from hashlib import sha256

import httpx
import structlog

from tokenbus import __version__
from tokenbus.bus.keys import Keys
from tokenbus.bus.liveness import Liveness, stop_task, wait_briefly
from tokenbus.bus.server.retry import retry_until_available
from tokenbus.bus.server.server import Server
from tokenbus.bus.webhooks import Deliveries, Delivery
from tokenbus.errors import SettingsError
from tokenbus.secret_env import Secret
from tokenbus_services.net.egress import AddressRefused, GuardedTransport
from tokenbus_services.net.http_client import Client
from tokenbus_services.net.outbound import Headers, Learn, egress_of, endpoint_url
from tokenbus_services.settings import WebhookSettings

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

LOOK_S = 1.0
"""Longest pause between two checks for due deliveries: another worker may have added one."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 3600.0
"""A delivery waits half of its age, within these, so each pause is longer than the one before."""
LEASE_S = 10.0
"""Beyond a try's own timeout: then another worker may try."""
GONE = 410
"""The receiver wants no more of it (Standard Webhooks)."""
_PREFIX = "whsec_"
_LEAST_SECRET_BYTES = 24


class Receiver:
    """Call `open`, `add`, `close`."""

    def __init__(
        self,
        name: str,
        settings: WebhookSettings,
        server: Server,
        keys: Keys,
        env: Mapping[str, str],
        *,
        learn: Learn,
        on_try: Callable[[str, str], None],
        on_waiting: Callable[[str, int], None],
        given_up: Callable[[Delivery, str, str], Awaitable[None]],
    ) -> None:
        """``on_try`` gets the name and how a try ended, ``on_waiting`` how many deliveries wait. ``given_up`` keeps a
        delivery aside: it gets the place where it waited and why. Raises SettingsError if the settings cannot work.
        """
        self.name = name
        self.settings = settings
        self._server = server
        self._deliveries = Deliveries(server, keys, name)
        self._on_try, self._on_waiting, self._given_up = on_try, on_waiting, given_up
        try:
            self._url = endpoint_url(settings.url)
            self._headers = Headers(settings, env, learn)
            egress = egress_of(settings)
        except ValueError as e:
            raise SettingsError("settings", f"webhooks.{name}", str(e)) from None
        self._secret = Secret(settings.secret_env, env, check=secret_problem)
        if not self._secret:
            variable = settings.secret_env
            problem = f"the environment has no {variable}, nor {variable}_FILE"
            raise SettingsError("settings", f"webhooks.{name}.secret_env", problem)
        self._learn = learn
        self._client = Client(GuardedTransport(egress), timeout=None)
        self._woken = asyncio.Event()
        self._tries: set[asyncio.Task[None]] = set()
        self._working: asyncio.Task[None] | None = None

    def open(self, liveness: Liveness) -> None:
        """Begin to deliver."""
        self._working = liveness.start(self._work(), name=f"webhook {self.name}")
        self._failed_work = liveness.failed_work

    async def close(self, *, within_s: float) -> None:
        """Let the tries that are under way end; what is left then is tried again by another worker."""
        await stop_task(self._working)
        if self._tries:
            await asyncio.wait(self._tries, timeout=within_s)
        for task in self._tries:
            task.cancel()
        await asyncio.gather(*self._tries, return_exceptions=True)
        await self._client.aclose()

    async def add(self, delivery: Delivery) -> None:
        """Deliver this. At a receiver for which too many wait it is kept aside at once. Raises redis-py's errors."""
        if await self._deliveries.waiting() >= self.settings.most_waiting:
            await self._give_up(delivery, f"{self.settings.most_waiting} deliveries wait for {self.name} already")
            return
        await self._deliveries.add(delivery)
        self._woken.set()

    async def _work(self) -> None:
        lease_ms = round((self.settings.timeout_s + LEASE_S) * 1000)
        while True:
            self._woken.clear()
            pause_s = LOOK_S
            if room := self.settings.at_once - len(self._tries):
                taken = await retry_until_available(
                    self._server, lambda most=room: self._deliveries.take(most, lease_ms=lease_ms), what="deliveries"
                )
                self._on_waiting(self.name, taken.waiting)
                for delivery in taken.now:
                    self._start(delivery)
                if taken.next_s is not None:
                    pause_s = min(pause_s, taken.next_s)
            await wait_briefly(self._woken, timeout_s=pause_s)

    def _start(self, delivery: Delivery) -> None:
        task = asyncio.create_task(self._try(delivery))
        self._tries.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tries.discard(task)
        self._woken.set()
        if not task.cancelled() and (error := task.exception()):
            log.error("delivery_not_settled", webhook=self.name, exc_info=error)  # it is due again after its lease
            self._failed_work("deliveries of webhooks")

    async def _try(self, delivery: Delivery) -> None:
        problem, pause_s = await self._posted(delivery)
        if not problem:
            self._on_try(self.name, "delivered")
            await self._settle(lambda: self._deliveries.done(delivery))
            return
        now = self._server.clock.now_ms()
        age_s = (now - delivery.since_ms) / 1000
        if pause_s is None or age_s >= self.settings.retry_s:
            await self._give_up(delivery, problem)
            await self._settle(lambda: self._deliveries.done(delivery))
            return
        self._on_try(self.name, "failed")
        pause_s = max(pause_s, age_s / 2 * random.uniform(0.75, 1.25))
        pause_s = min(max(pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
        log.info("delivery_failed", webhook=self.name, run=delivery.run, problem=problem, again_s=round(pause_s))
        await self._settle(lambda: self._deliveries.again(delivery, now + round(pause_s * 1000)))

    async def _give_up(self, delivery: Delivery, problem: str) -> None:
        self._on_try(self.name, "given_up")
        log.warning("delivery_given_up", webhook=self.name, run=delivery.run, problem=problem)
        await self._given_up(delivery, self._deliveries.place, problem)

    async def _settle(self, do: Callable[[], Awaitable[None]]) -> None:
        await retry_until_available(self._server, do, what="end of a delivery")

    async def _posted(self, delivery: Delivery) -> tuple[str, float | None]:
        """What went wrong, empty if nothing did, and how long the receiver wants to be left alone; None: for ever."""
        try:
            async with asyncio.timeout(self.settings.timeout_s):
                response = await self._client.send(self._request(delivery), stream=True, follow_redirects=False)
                try:
                    if response.is_success:
                        return "", 0.0
                    problem = f"HTTP {response.status_code}"
                    return problem, None if response.status_code == GONE else _retry_after(response)
                finally:
                    await response.aclose()
        except AddressRefused as e:
            return str(e), 0.0
        except TimeoutError:
            return f"no answer within {self.settings.timeout_s:g} s", 0.0
        except (httpx.HTTPError, OSError) as e:
            return f"{type(e).__name__}: {e}".removesuffix(": "), 0.0

    def _request(self, delivery: Delivery) -> httpx.Request:
        secrets = self._secret.value.split()
        self._learn(secrets)
        headers = {
            **self._headers(),
            "content-type": "application/json",
            "user-agent": f"tokenbus/{__version__}",
            **signed(delivery, secrets, self._server.clock.now_ms() // 1000),
        }
        return self._client.build_request("POST", self._url, content=delivery.body, headers=headers)


def signed(delivery: Delivery, secrets: list[str], now_s: int) -> dict[str, str]:
    """The headers of Standard Webhooks (standardwebhooks.com): id, time of this try, and a signature by each secret."""
    text = f"{delivery.id}.{now_s}.".encode() + delivery.body
    digests = [hmac.digest(_key(secret), text, sha256) for secret in secrets]
    return {
        "webhook-id": delivery.id,
        "webhook-timestamp": str(now_s),
        "webhook-signature": " ".join(f"v1,{b64encode(digest).decode()}" for digest in digests),
    }


def secret_problem(value: str) -> str:
    """The problem of the secrets, without showing them; empty if they are valid."""
    for secret in value.split():
        with suppress(binascii.Error):
            if secret.startswith(_PREFIX) and len(_key(secret)) >= _LEAST_SECRET_BYTES:
                continue
        return f"must be {_PREFIX} and base64 of {_LEAST_SECRET_BYTES} bytes at least; several are separated by spaces"
    return ""


def _key(secret: str) -> bytes:
    return b64decode(secret.removeprefix(_PREFIX), validate=True)


def _retry_after(response: httpx.Response) -> float:
    value = response.headers.get("retry-after", "")
    return min(float(value), LONGEST_PAUSE_S) if value.isascii() and value.isdigit() and len(value) < 10 else 0.0
