"""What the blob store says of its last failure, on its health page."""

from __future__ import annotations

import msgspec

from tokenbus_services.cli.http_probe import ProbedPage, page


class BlobFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The latest request that the store failed."""

    code: str
    ago_s: int


class _Health(msgspec.Struct, frozen=True):
    last_failure: BlobFailure | None = None


async def blob_failure(url: str, *, within_s: float) -> BlobFailure | None:
    """The store's last failure, if that was lately. Raises OSError, and ValueError if the answer is not HTTP."""
    return last_failure(await page(f"{url.rstrip('/')}/health"), within_s=within_s)


def last_failure(health: ProbedPage, *, within_s: float) -> BlobFailure | None:
    """The failure on this page, if it is of the last ``within_s``; None also for a page of something else."""
    try:
        found = msgspec.json.decode(health.body, type=_Health).last_failure
    except msgspec.DecodeError:
        return None
    return found if found and found.ago_s <= within_s else None
