"""Modules of a deployment's own, mounted beside its settings."""

from __future__ import annotations

from typing import Any

from tokenbus.policy import StreamContext, StreamState
from tokenbus_services.weather import weather

__all__ = ["shout", "weather"]


async def shout(chunk: Any, state: StreamState, context: StreamContext[Any]) -> None:
    """A policy that changes nothing."""
    await context.send(chunk)
