"""The tool executor's app."""

from __future__ import annotations

from faststream.asgi import AsgiFastStream
from prometheus_client import CollectorRegistry, Gauge

from tokenbus_services.runtime.app.faststream_source import attach
from tokenbus_services.runtime.app.service_app import make_app, make_broker
from tokenbus_services.runtime.supervision import stuck_after_s
from tokenbus_services.settings import Settings
from tokenbus_services.settings.file import add_settings_directory_to_path
from tokenbus_services.telemetry import open_tracer
from tokenbus_services.tools.executor import ToolExecutor
from tokenbus_services.tools.service import CallMetrics, ToolService


def create(settings: Settings) -> AsgiFastStream:
    """Create a tool executor. Raises SettingsError for an invalid tool.

    Python tools may be next to the settings file or in the working directory.
    """
    add_settings_directory_to_path()
    registry = CollectorRegistry()
    broker = make_broker(settings, registry)
    tracer = open_tracer(settings, "tools", registry)
    metrics = CallMetrics(registry)
    executor = ToolExecutor.from_settings(settings, on_end=metrics.executor_ended)
    service = ToolService(settings, executor, metrics, tracer)
    Gauge("tokenbus_tool_executors", "Processes in which Python tools run.", registry=registry).set_function(
        lambda: executor.processes
    )
    Gauge("tokenbus_tool_calls_running", "Tool calls running.", registry=registry).set_function(
        lambda: len(service.calls)
    )
    attach(
        broker,
        stream=f"{settings.prefix}:{{n}}:tools",
        title="tools",
        description="Tool calls to run; results go to `events`.",
        read=service.read,
        handle=service.start,
        liveness=service.liveness,
    )
    assert settings.redis_url
    stuck_s = stuck_after_s(settings.redis_url)
    return make_app(service, broker, registry, stuck_s=stuck_s, drain=service.calls.drain)
