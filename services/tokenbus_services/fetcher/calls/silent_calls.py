"""This fetcher's calls that have no byte of an answer yet, for `/metrics`, `tokenbus doctor` and `top`."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Gauge

from tokenbus.bus.activity import OTHER, short, silent_fields, slot_of
from tokenbus.bus.keys import Keys
from tokenbus.bus.liveness import Liveness, stop_task
from tokenbus.bus.scripts.activity import count_activity
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus_services.runtime.metrics import KnownModels, write_regularly

MAX_MODELS = 16
"""Maximum models that are counted separately; the rest of a provider's are `other`."""

Model = tuple[str, str]
"""Provider and model."""


class SilentCalls:
    """Call `open`, then `close`."""

    def __init__(
        self, server: Server, keys: Keys, registry: CollectorRegistry, *, worker: str, models: KnownModels
    ) -> None:
        """``models``: those that may be labels."""
        self._server = server
        self._keys = keys
        self._worker = short(worker)
        self._models = models
        self._since: dict[Model, dict[object, int]] = {}
        """By provider and model: since when each call waits, in Unix milliseconds, the oldest first."""
        self._written: set[Model] = set()
        self._task: asyncio.Task[None] | None = None
        self._gauge = Gauge(
            "tokenbus_attempts_silent",
            "Provider calls in progress without a byte of an answer for 30 s.",
            ["provider", "model"],
            registry=registry,
        )

    async def open(self, liveness: Liveness) -> None:
        """Begin to write."""
        self._task = liveness.start(write_regularly(self.write), name="silent calls")

    async def close(self) -> None:
        """Stop; the counts of an ended fetcher are forgotten with their slot."""
        await stop_task(self._task)

    def answered(self, provider: str, model: str) -> None:
        """A model answers, so its name may be a label from now on."""
        self._gauge.labels(*self._models.label(provider, model, ok=True))

    def began(self, provider: str, model: str, since_ms: int) -> Callable[[], None]:
        """Count a call that is silent now. Returns what ends that."""
        name = provider, short(model)
        if name not in self._since and len(self._since) >= MAX_MODELS:
            name = provider, OTHER
        call = object()
        self._since.setdefault(name, {})[call] = since_ms
        gauge = self._gauge.labels(*self._models.label(provider, model, ok=False))
        gauge.inc()

        def ended() -> None:
            gauge.dec()
            calls = self._since[name]
            del calls[call]
            if not calls:
                del self._since[name]

        return ended

    async def write(self) -> None:
        """Report how many are silent, and once when none are left. Raises redis-py's errors."""
        levels = Counter[str]()
        for name in self._written | set(self._since):
            many, since = silent_fields(*name, self._worker)
            calls = self._since.get(name, {})
            levels[many], levels[since] = len(calls), min(calls.values(), default=0)
        if not levels:
            return
        key = self._keys.activity(slot_of(self._server.clock.now_ms()))
        await run_script(self._server, count_activity(key, {}, levels))
        self._written = set(self._since)
