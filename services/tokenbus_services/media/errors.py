"""Why the media of a turn could not be loaded."""

from __future__ import annotations

from tokenbus.errors import (
    BlobError,
    BlobNotFound,
    BlobRefused,
    BlobTooLarge,
    BlobUnauthorized,
    BlobUnavailable,
)
from tokenbus.events.error_info import ErrorClass, ErrorInfo


class MediaFailed(Exception):
    """A media failure. ``error`` names the media at fault and says whether a retry may help."""

    def __init__(self, error: BlobError, where: str) -> None:
        """``where``: the location of the media in the conversation."""
        super().__init__(f"{where}: {error.told or error}")
        self.error = ErrorInfo(
            code=error.code, kind=_kind(error), message=str(self), retryable=error.retryable, where=where
        )


def _kind(error: BlobError) -> ErrorClass:
    match error:
        case BlobNotFound() | BlobRefused() | BlobTooLarge():
            return "invalid_request"
        case BlobUnauthorized():
            return "auth"
        case BlobUnavailable():
            return "server"
        case _:
            return "internal"
