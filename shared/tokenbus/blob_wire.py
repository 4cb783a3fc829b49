"""The HTTP interface of the blob service: paths, and errors as JSON. No IO here."""

from __future__ import annotations

import msgspec

from tokenbus import errors
from tokenbus.events.run_info import RunInfo

PATH = "/blobs"
ARCHIVE_PATH = "/archive"
MAX_ANSWER_BYTES = 64 * 2**10
"""Maximum size of any answer other than a blob's content."""
DEFAULT_URL = "http://127.0.0.1:8085"
TOKEN_ENV = "TOKENBUS_BLOB_TOKEN"
URL_ENV = "TOKENBUS_BLOBS_URL"
DEPLOYMENT_ENV = "TOKENBUS_DEPLOYMENT"
"""Set by `tokenbus up` for its services: a random id that distinguishes its blob service from another deployment's on
the same port."""
DEPLOYMENT_HEADER = "tokenbus-deployment"
"""Header of every answer of a blob service that has an id."""


def check_deployment(expected: str, found: str | None, where: str) -> None:
    """Raises BlobUnavailable if the answer is from another deployment's service. ``expected``: empty if unknown."""
    if expected and expected != found:
        raise errors.BlobUnavailable(where, "what answers there is not the blob service of this deployment")


class ArchivePage(msgspec.Struct, frozen=True, kw_only=True):
    """Some of the archived runs."""

    runs: list[RunInfo]
    next: str | None = None
    """Value of ``after`` for the next page; None at the end."""


class ArchiveDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """What was deleted."""

    logs: int
    blobs: list[str] = []
    """Ids of the blobs that the logs named, and that no other log names."""


class ArchiveNames(msgspec.Struct, frozen=True, kw_only=True):
    named: bool
    """Whether the log of an archived run names this blob."""


class BlobProblem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of an error answer. ``size`` and ``limit``, in bytes, are set if the upload was too large."""

    code: str
    message: str
    size: int | None = None
    limit: int | None = None


def blob_error(status: int, answer: bytes, what: str) -> errors.BlobError:
    """Convert an error answer of the service to the matching exception."""
    try:
        problem = msgspec.json.decode(answer, type=BlobProblem)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        problem = BlobProblem(code="", message=f"HTTP {status}")
    match problem.code:
        case errors.BlobNotFound.code:
            return errors.BlobNotFound(what)
        case errors.BlobTooLarge.code:
            return errors.BlobTooLarge(problem.size or 0, problem.limit or 0)
        case errors.BlobRefused.code:
            return errors.BlobRefused(what, problem.message)
        case errors.BlobCorrupt.code:
            return errors.BlobCorrupt(what, problem.message)
        case errors.BlobUnauthorized.code:
            return errors.BlobUnauthorized(what)
        case errors.BlobQuotaExceeded.code:
            return errors.BlobQuotaExceeded(what, problem.message)
        case errors.BlobStoreFull.code:
            return errors.BlobStoreFull(what, problem.message)
        case _:
            return errors.BlobUnavailable(what, problem.message)
