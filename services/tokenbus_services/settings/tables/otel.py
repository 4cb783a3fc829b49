"""OpenTelemetry."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from tokenbus_services.settings.types import HttpUrl, Table


class OtelSettings(Table, frozen=True, kw_only=True):
    """If the table exists, even empty, workers send traces and metrics by OTLP over HTTP. The standard variables
    (`OTEL_…`) apply to keys that are left out. See docs/operate/telemetry.md.
    """

    endpoint: HttpUrl | None = None
    """The collector's address, without `/v1/traces`. None: that of the environment, else `http://localhost:4318`."""
    sample: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Share of the runs that are traced, of those whose publisher does not decide it. None: that of the environment,
    else 1.
    """
    content: bool = False
    """Whether spans hold messages, answers, and arguments and results of tools."""
