"""The tool executor's app."""

from __future__ import annotations

from faststream.asgi import AsgiFastStream
from prometheus_client import Gauge

from tokenbus_services.runtime.worker_core import WorkerCore
from tokenbus_services.settings import Settings
from tokenbus_services.settings.file import add_settings_directory_to_path
from tokenbus_services.tools.executor import ToolExecutor
from tokenbus_services.tools.service import CallMetrics, ToolService


def create(settings: Settings) -> AsgiFastStream:
    """Create a tool executor. Raises SettingsError for an invalid tool.

    Python tools may be next to the settings file or in the working directory.
    """
    add_settings_directory_to_path()
    core = WorkerCore(settings, "tools")
    metrics = CallMetrics(core.registry)
    executor = ToolExecutor.from_settings(settings, on_end=metrics.executor_ended)
    service = ToolService(core, executor, metrics)
    processes = Gauge("tokenbus_tool_executors", "Processes in which Python tools run.", registry=core.registry)
    processes.set_function(lambda: executor.processes)
    running = Gauge("tokenbus_tool_calls_running", "Tool calls running.", registry=core.registry)
    running.set_function(lambda: len(service))
    return service.app()
