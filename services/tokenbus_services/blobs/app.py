"""The blob store's app: the blob routes in front of the pages that every service has."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import structlog
from obstore.store import ObjectStore
from prometheus_client import CollectorRegistry

from tokenbus.blob_wire import DEPLOYMENT_ENV
from tokenbus.bus.liveness import STUCK_S, Liveness, rest, slack, stop_task
from tokenbus.bus.run_record import SESSION_LIVES
from tokenbus.bus.server.retry import Defects
from tokenbus.errors import BlobError
from tokenbus_services.blobs.archive import Archive
from tokenbus_services.blobs.archive_http import ArchiveRoutes
from tokenbus_services.blobs.archive_keys import TenantKeys
from tokenbus_services.blobs.auth import secret_of
from tokenbus_services.blobs.backend import opened
from tokenbus_services.blobs.http import AsgiApp, BlobMetrics, BlobRoutes, WithBlobs
from tokenbus_services.blobs.store import BlobStore
from tokenbus_services.blobs.store import create as create_store
from tokenbus_services.runtime.app.service_app import make_app, make_broker
from tokenbus_services.settings import ArchiveSettings, Settings
from tokenbus_services.telemetry import NO_TRACER, RunTracer, open_tracer

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

SWEEPS_A_LIFE = 10
"""How many times in a blob's lifetime the store is swept."""
SWEEP_AGAIN_S = 60.0
"""Pause after a sweep that failed."""
SWEEPING_S = 3600.0
"""Maximum duration of one sweep: a store may hold millions of blobs, or be on a slow disk."""


class BlobService:
    """The store, and the periodic sweep that removes expired blobs."""

    name = "blobs"

    def __init__(
        self, store: BlobStore, *, ttl_s: float, archive: Archive | None = None, tracer: RunTracer = NO_TRACER
    ) -> None:
        self._store = store
        self._archive = archive
        self._pause_s = ttl_s / SWEEPS_A_LIFE
        self._tracer = tracer
        self.liveness = Liveness()
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        return self._sweeper is not None and not self._sweeper.done()

    async def open(self) -> None:
        await self._store.check()
        self._sweeper = self.liveness.start(self._sweep(), name="blob sweep")

    async def close(self) -> None:
        await stop_task(self._sweeper)
        await self._tracer.close()

    async def _sweep(self) -> None:
        """Sweep until cancelled. Raises what always fails: without the sweep the disk fills up."""
        defects = Defects()
        while True:
            pause_s = self._pause_s
            try:
                with slack(SWEEPING_S):
                    removed = await self._store.sweep()
                    logs = await self._archive.sweep() if self._archive else 0
                if removed or logs:
                    log.info("blobs_swept", removed=removed, archived_logs=logs)
                defects.none()
            except Exception as e:  # any exception: the next sweep may succeed
                log.warning("blob_sweep_failed", error=f"{type(e).__name__}: {e}")
                self.liveness.failed_work("blob sweep")
                if not isinstance(e, BlobError):  # the store may be away for any time
                    defects.count(e)
                pause_s = min(pause_s, SWEEP_AGAIN_S)
            await rest(pause_s)


def create(settings: Settings) -> AsgiApp:
    """Create a blob store. Raises SettingsError."""
    kept, archived = settings.retention, settings.archive
    directory = Path(settings.data_dir) / "blobs"
    longest_s = max(SESSION_LIVES * kept.session_s, 2 * archived.longest_s if archived else 0)
    objects = opened(settings.blobs.url, directory)
    store = create_store(settings.blobs, objects, lease_s=kept.open_run_s, longest_lease_s=longest_s)
    archive = open_archive(archived, objects, store) if archived else None
    registry = CollectorRegistry()
    tracer = open_tracer(settings, "blobs", registry)
    service = BlobService(store, ttl_s=settings.blobs.ttl_s, archive=archive, tracer=tracer)
    metrics = BlobMetrics(registry)
    app = make_app(service, make_broker(settings, registry), registry, stuck_s=STUCK_S, says=metrics.health)
    token = secret_of(settings.blobs.token_env, os.environ)
    routes = BlobRoutes(store, token=token, tracer=tracer, metrics=metrics)
    logs = ArchiveRoutes(archive, token=token, metrics=metrics) if archive else None
    return WithBlobs(app, routes, archive=logs, deployment=os.environ.get(DEPLOYMENT_ENV, ""))


def open_archive(settings: ArchiveSettings, objects: ObjectStore, store: BlobStore) -> Archive:
    """The archive of these settings. Raises SettingsError."""
    keys = TenantKeys(Path(settings.keys) if settings.keys else None)
    return Archive(objects, store, keys, keep_s=settings.keep_s, keep_tenants_s=settings.keep_tenants_s)
