"""The policy stage's application."""

from __future__ import annotations

from faststream.asgi import AsgiFastStream

from tokenbus.bus.liveness import Liveness
from tokenbus.bus.server.server import Server
from tokenbus.bus.stage.stage import Stage
from tokenbus_services.policy_stage.run_task import GROUP
from tokenbus_services.policy_stage.service import PolicyService
from tokenbus_services.runtime.worker_core import StageService, WorkerCore, stage_app
from tokenbus_services.settings import Settings
from tokenbus_services.settings.file import add_settings_directory_to_path


def create(settings: Settings) -> AsgiFastStream:
    """Create one policy worker. Raises SettingsError at startup if a policy cannot be loaded.

    Policies may be next to the settings file or in the working directory, as tools may.
    """
    add_settings_directory_to_path()
    core = WorkerCore(settings, "policy")
    service = PolicyService(settings, core.registry, core.tracer)
    stage = StageService(
        core,
        name=GROUP,
        topic="drafts",
        logic=service.logic,
        companion=lambda server, stage, liveness: _PolicyCompanion(service, server, stage, liveness),
        opening=service.start,
        room=service.room,
        description="Events of runs with policies, before they are published; verdicts go to `events`.",
    )
    return stage_app(stage, core)


class _PolicyCompanion:
    """Opens and closes the service together with its stage."""

    def __init__(self, service: PolicyService, server: Server, stage: Stage, liveness: Liveness) -> None:
        self._service, self._server, self._stage, self._liveness = service, server, stage, liveness

    async def open(self) -> None:
        await self._service.open(self._server, self._stage, self._liveness)

    async def close(self) -> None:
        await self._service.close()
