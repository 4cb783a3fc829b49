"""The webhooks' worker: hands each notice to its receivers.

A notice becomes one delivery a receiver; a delivery has an id of its own, so a notice may be handed over twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge

from tokenbus.bus.dead_letters import DeadLetter, dead_letter
from tokenbus.bus.keys import Keys
from tokenbus.bus.liveness import Liveness
from tokenbus.bus.server.retry import retry_until_available
from tokenbus.bus.server.server import Server
from tokenbus.bus.server.stream_reader import id_key
from tokenbus.bus.topology import WEBHOOKS
from tokenbus.bus.webhooks import Deliveries, Delivery
from tokenbus.bus.work_queue import QueueItem
from tokenbus.events.notices import decode_notice
from tokenbus_services.redaction.redactor import LEARNED
from tokenbus_services.runtime.app.service_app import worker_name
from tokenbus_services.runtime.metrics import DeadLetterMetrics
from tokenbus_services.runtime.queue_work import QueueWork, dead_letter_item
from tokenbus_services.runtime.worker_core import DeploymentAgreement
from tokenbus_services.settings import Settings
from tokenbus_services.webhooks.receiver import Receiver

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

GROUP, TOPIC = WEBHOOKS
AT_ONCE = 64
STILL_S = 60.0
MOST_DELIVERIES = 3
"""A notice whose workers died this often is kept aside: it may be what kills them."""


class WebhookService:
    """The webhooks of a deployment, shared among its workers."""

    name = GROUP

    def __init__(self, settings: Settings, metrics: WebhookMetrics, env: Mapping[str, str]) -> None:
        """Raises SettingsError if a receiver cannot work."""
        assert settings.redis_url
        self._settings = settings
        self._keys = keys = settings.keys
        self._server = server = Server(settings.redis_url)
        server.on_dead_letter = metrics.dead_letters.count
        self.liveness = Liveness()
        worker = worker_name()
        self._deployment = DeploymentAgreement(server, keys, self.liveness, settings.durability, worker=worker)
        self._deployment.on_grown(self._serve_more)
        self._receivers = {
            name: Receiver(
                name,
                webhook,
                server,
                keys,
                env,
                learn=LEARNED.learn,
                on_try=metrics.tried,
                on_waiting=metrics.waiting,
                given_up=self._keep_aside,
            )
            for name, webhook in settings.webhooks.items()
        }
        self._notices = QueueWork(
            server,
            settings,
            group=GROUP,
            topic=TOPIC,
            worker=worker,
            most=AT_ONCE,
            work=self._hand_over,
            poisoned=partial(dead_letter_item, server, settings, GROUP),
            still_s=lambda item: STILL_S,
            liveness=self.liveness,
        )

    @property
    def ready(self) -> bool:
        return self._notices.healthy

    async def open(self) -> None:
        await self._server.check()
        await self._deployment.open()
        await self._notices.open()
        for receiver in self._receivers.values():
            receiver.open(self.liveness)

    async def drain(self) -> None:
        """Take nothing new, and let deliveries in progress finish."""
        await self._notices.drain()

    async def close(self) -> None:
        await self._notices.close()
        await self._deployment.close()
        for receiver in self._receivers.values():
            await receiver.close(within_s=0 if self.liveness.failed else receiver.settings.timeout_s)
        await self._server.aclose()

    async def _serve_more(self, keys: Keys) -> None:
        await self._notices.add_partitions(keys)

    async def read(self) -> QueueItem:
        """Return the next notice, once there is room for it."""
        return await self._notices.read()

    async def start(self, item: QueueItem) -> None:
        await self._notices.start(item)

    async def _hand_over(self, item: QueueItem) -> None:
        if item.deliveries > MOST_DELIVERIES:
            raise RuntimeError(f"its worker was lost {item.deliveries - 1} times")
        for name, data in item.fields.items():
            run, notice = name.decode(), decode_notice(data)
            ended_ms = id_key(item.entry_id)[0]
            for told in notice.receivers:
                delivery_id = notice.delivery_id(run, told)
                delivery = Delivery(delivery_id, run, self._server.clock.now_ms(), notice.body(ended_ms))
                receiver = self._receivers.get(told)
                if receiver is None:  # not in these settings any more, or not yet
                    place = Deliveries(self._server, self._keys, told).place
                    await self._keep_aside(delivery, place, f"these settings have no webhook {told!r}")
                elif notice.type in receiver.settings.events:
                    await retry_until_available(
                        self._server, lambda to=receiver, what=delivery: to.add(what), what="delivery of a webhook"
                    )

    async def _keep_aside(self, delivery: Delivery, place: str, problem: str) -> None:
        entry = DeadLetter(
            reason=problem, stage=GROUP, stream=place, entry=delivery.id, bytes=delivery.body, run=delivery.run
        )
        await dead_letter(self._server, self._keys, entry, most=self._settings.retention.dead_entries)


class WebhookMetrics:
    """Counts tries by receiver and how they ended, and shows how many deliveries wait."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.dead_letters = DeadLetterMetrics(registry)
        self._tries = Counter(
            "tokenbus_webhook_tries",
            "Tries to tell a receiver, by how they ended; given up: kept aside.",
            ["webhook", "result"],
            registry=registry,
        )
        self._waiting = Gauge(
            "tokenbus_webhook_waiting",
            "Deliveries that wait for a receiver; each worker shows the same.",
            ["webhook"],
            registry=registry,
        )

    def tried(self, webhook: str, result: str) -> None:
        """Count a try: ``delivered``, ``failed`` or ``given_up``."""
        self._tries.labels(webhook, result).inc()

    def waiting(self, webhook: str, count: int) -> None:
        """Set how many wait."""
        self._waiting.labels(webhook).set(count)
