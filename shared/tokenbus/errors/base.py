"""The class from which every error of tokenbus derives."""

from __future__ import annotations

from typing import ClassVar


class TokenbusError(Exception):
    """Base class of all errors of this package."""

    code: ClassVar[str] = "tokenbus_error"
    retryable: bool = False
    """Whether the same call may succeed later without any change. For a run that ended badly, this comes from its
    error.
    """
