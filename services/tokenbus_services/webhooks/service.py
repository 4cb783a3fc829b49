"""The webhooks' worker: hands each notice to its receivers.

A notice becomes one delivery a receiver; a delivery has an id of its own, so a notice may be handed over twice.
"""

from __future__ import annotations

from collections.abc import Mapping

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge

from tokenbus.bus.dead_letters import DeadLetter, dead_letter
from tokenbus.bus.server.retry import retry_until_available
from tokenbus.bus.server.stream_reader import id_key
from tokenbus.bus.topology import WEBHOOKS
from tokenbus.bus.webhooks import Deliveries, Delivery
from tokenbus.bus.work_queue import QueueItem
from tokenbus.events.notices import decode_notice
from tokenbus_services.redaction.redactor import LEARNED
from tokenbus_services.runtime.queue_work import MOST_DELIVERIES, QueueService
from tokenbus_services.runtime.worker_core import WorkerCore
from tokenbus_services.webhooks.receiver import Receiver

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

AT_ONCE = 64
STILL_S = 60.0


class WebhookService(QueueService):
    """The webhooks of a deployment, shared among its workers."""

    name, topic = WEBHOOKS
    description = "Ends of runs of which receivers are told."

    def __init__(self, core: WorkerCore, env: Mapping[str, str]) -> None:
        """Raises SettingsError if a receiver cannot work."""
        super().__init__(core, most=AT_ONCE)
        metrics = WebhookMetrics(core.registry)
        self._receivers = {
            name: Receiver(
                name,
                webhook,
                core.server,
                self._keys,
                env,
                learn=LEARNED.learn,
                on_try=metrics.tried,
                on_waiting=metrics.waiting,
                given_up=self._keep_aside,
            )
            for name, webhook in core.settings.webhooks.items()
        }

    async def _opening(self) -> None:
        for receiver in self._receivers.values():
            receiver.open(self.liveness)

    async def _closing(self) -> None:
        for receiver in self._receivers.values():
            await receiver.close(within_s=0 if self.liveness.failed else receiver.settings.timeout_s)

    def _still_s(self, item: QueueItem) -> float:
        return STILL_S

    async def _work(self, item: QueueItem) -> None:
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
            reason=problem, stage=self.name, stream=place, entry=delivery.id, bytes=delivery.body, run=delivery.run
        )
        await dead_letter(self._server, self._keys, entry, most=self._settings.retention.dead_entries)


class WebhookMetrics:
    """Counts tries by receiver and how they ended, and shows how many deliveries wait."""

    def __init__(self, registry: CollectorRegistry) -> None:
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
