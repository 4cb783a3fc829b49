"""A span that has ended, as services record it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

Value = str | int | float | bool | Sequence[str]
Kind = Literal["internal", "client", "consumer", "server"]

MAX_CONTENT_CHARS = 64 * 1024
"""Longest content of an attribute."""


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """One span that has ended. Times are Unix milliseconds."""

    name: str
    span_id: int
    parent_id: int
    begin_ms: int
    end_ms: int
    kind: Kind = "internal"
    attributes: Mapping[str, Value | None]
    """None: left out."""
    error: str | None = None
    """The error's class, if it ended in one."""
    events: Sequence[tuple[str, int]] = ()
    """Names and times."""
