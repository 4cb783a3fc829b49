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
    told: ClassVar[str | None] = None
    """What a client of a gateway or a run reads instead of the text, if that may name hosts or quote other errors."""


def public_reason(error: BaseException, otherwise: str) -> str:
    """What a client may read of an error: the code and text of one of ours. The text of any other may hold anything,
    so it is ``otherwise``, and only logs and dead letters have the text.
    """
    return f"{error.code}: {error.told or error}" if isinstance(error, TokenbusError) else otherwise
