"""The last failure of a blob store, from its health page."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from tokenbus.errors import BlobQuotaExceeded
from tokenbus_services.blobs.http import BlobMetrics
from tokenbus_services.cli.http_probe import ProbedPage
from tokenbus_services.cli.inspect import BlobFailure, last_failure


def page(metrics: BlobMetrics) -> ProbedPage:
    return ProbedPage(200, {}, msgspec.json.encode({"service": "blobs", **metrics.health()}))


def test_the_last_failure_is_read_with_its_age() -> None:
    metrics = BlobMetrics(CollectorRegistry())
    assert last_failure(page(metrics), within_s=600) is None
    metrics.failed(BlobQuotaExceeded("quota", "no room"))
    assert last_failure(page(metrics), within_s=600) == BlobFailure(code="blob_quota_exceeded", ago_s=0)
    assert last_failure(page(metrics), within_s=-1) is None, "too long ago"


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"last_failure": "x"}', b"\xff"])
def test_a_page_of_something_else_is_no_failure(body: bytes) -> None:
    assert last_failure(ProbedPage(200, {}, body), within_s=600) is None
