"""Describes providers and a blob store that fail, in words: for `doctor` and `top`."""

from __future__ import annotations

from tokenbus.bus.activity import Failure


def failure(found: Failure) -> str:
    """How a call failed: class, code and status."""
    code = f", {found.code}" if found.code != found.kind else ""
    return f"{found.kind}{code}" + (f", HTTP {found.status}" if found.status else "")


def time_span(ms: int) -> str:
    """A time in seconds, or in minutes if it is long."""
    return f"{ms // 1000} s" if ms < 120_000 else f"{ms // 60_000} min"
