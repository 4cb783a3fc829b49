"""Without OpenTelemetry a tracer does nothing."""

from __future__ import annotations

import msgspec
from prometheus_client import CollectorRegistry

from tokenbus_services.settings import OtelSettings, Settings
from tokenbus_services.telemetry import NO_TRACER, open_tracer, worked_for

SAMPLED = f"00-{1:032x}-{2:016x}-01"


def test_a_tracer_that_is_off_samples_nothing_and_hands_a_publishers_context_on_as_it_came() -> None:
    tracer = open_tracer(Settings(), "parser", CollectorRegistry(), env={})
    assert tracer is NO_TRACER
    assert tracer.trace("run", SAMPLED) is None
    assert tracer.trace_of("blobs", SAMPLED) is None
    assert tracer.handed_on("run", SAMPLED, "tool", 0, 1) == SAMPLED
    assert tracer.handed_on("run", "", "tool", 0, 1) is None
    with tracer.working("run", SAMPLED, "tool", 0, 1):
        assert worked_for() == ""


def test_the_sdks_switch_turns_it_off_against_the_settings() -> None:
    settings = msgspec.structs.replace(Settings(), otel=OtelSettings())
    assert open_tracer(settings, "parser", CollectorRegistry(), env={"OTEL_SDK_DISABLED": "true"}) is NO_TRACER
