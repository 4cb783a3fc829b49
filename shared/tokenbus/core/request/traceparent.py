"""The form of a W3C `traceparent`: version, trace id, parent span id, flags."""

from __future__ import annotations

import re

from tokenbus.events.requests import TRACEPARENT_PATTERN

TRACEPARENT = re.compile(TRACEPARENT_PATTERN)


def is_traceparent(text: str) -> bool:
    """Whether the text is a valid `traceparent`."""
    return TRACEPARENT.fullmatch(text) is not None
