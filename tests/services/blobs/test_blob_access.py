"""Who may use the blob service, how much it takes, and urls that need no token."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import httpx
import pytest
from obstore.store import MemoryStore
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from tests.services.blobs.conftest import MemoryBlobs, Serve, s3_store
from tokenbus.blobs import blob_id_of
from tokenbus.client.blobs import Blobs
from tokenbus.errors import BlobQuotaExceeded, BlobRefused, BlobTooLarge, BlobUnauthorized, SettingsError
from tokenbus_services.blobs.auth import admitted, secret_of, token_of
from tokenbus_services.blobs.client import HttpBlobs
from tokenbus_services.blobs.http import BlobMetrics, BlobRoutes
from tokenbus_services.blobs.store import BlobStore
from tokenbus_services.settings import BlobSettings

TOKEN = "a-long-random-token"


async def test_nothing_is_given_or_taken_without_the_token(local_store: MemoryBlobs, serve: Serve) -> None:
    served = await serve(BlobRoutes(local_store.store, token=TOKEN))
    settings = BlobSettings(service_url=served.url)
    async with HttpBlobs.from_settings(settings, {"TOKENBUS_BLOB_TOKEN": TOKEN}) as blobs:
        ref = await blobs.store(b"secret", "text/plain")
        assert await blobs.load(ref.blob_id) == b"secret"
    for wrong in ("", "wrong", TOKEN[:-1], TOKEN + "x"):
        async with HttpBlobs.from_settings(settings, {"TOKENBUS_BLOB_TOKEN": wrong}) as blobs:
            for call in (blobs.load, blobs.lease, lambda _: blobs.store(b"x", "text/plain")):
                with pytest.raises(BlobUnauthorized) as refused:
                    await call(ref.blob_id)
                assert TOKEN not in str(refused.value)
    async with httpx.AsyncClient(base_url=served.url, timeout=60) as http:
        for method in ("GET", "HEAD", "PUT", "DELETE"):
            answer = await http.request(method, f"/blobs/{ref.blob_id}")
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
            assert b"secret" not in answer.content


async def test_services_and_clients_of_the_blob_store_take_a_new_token_whichever_sees_it_first(
    local_store: MemoryBlobs, serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenbus.secret_env.POLL_S", 0.0)
    files = {who: tmp_path / who for who in ("store", "fetcher", "client")}
    for file in files.values():
        file.write_text("the-old-token")
    monkeypatch.setenv("TOKENBUS_BLOB_TOKEN_FILE", str(files["client"]))
    monkeypatch.delenv("TOKENBUS_BLOB_TOKEN", raising=False)
    served = await serve(BlobRoutes(local_store.store, token=secret_of("X", {"X_FILE": str(files["store"])})))
    client = Blobs(served.url)
    settings = BlobSettings(service_url=served.url)
    async with HttpBlobs.from_settings(settings, {"TOKENBUS_BLOB_TOKEN_FILE": str(files["fetcher"])}) as fetcher:
        ref = await fetcher.store(b"x", "text/plain")
        for who in ("store", "fetcher", "client"):
            files[who].write_text("the-new-token\n")
            assert await fetcher.load(ref.blob_id) == await client.get(ref.blob_id) == b"x"


@pytest.mark.parametrize("header", [b"", b"Bearer", b"Bearer ", b"Basic a-long-random-token", b"a-long-random-token"])
def test_only_a_bearer_token_counts(header: bytes) -> None:
    assert not admitted(header, TOKEN)
    assert admitted(b"bearer " + TOKEN.encode(), TOKEN)
    assert admitted(header, ""), "a service without a token asks for none"


@pytest.mark.parametrize("token", ["two words", "ümlaut", "line\nend"])
def test_a_token_that_no_header_can_hold_is_an_error_without_the_token(token: str) -> None:
    with pytest.raises(SettingsError) as refused:
        token_of(BlobSettings(), {"TOKENBUS_BLOB_TOKEN": token})
    assert token not in str(refused.value)


def _limited(quota: int) -> BlobStore:
    return BlobStore(MemoryStore(), max_bytes=80, ttl_s=100.0, lease_s=100.0, quota_bytes=quota)


async def test_a_full_quota_refuses_new_content_and_accepts_stored_content() -> None:
    store = _limited(100)
    first = await store.put(_once(b"a" * 60), "text/plain")
    with pytest.raises(BlobQuotaExceeded, match="60 of 100 bytes are used, 41 more"):
        await store.put(_once(b"b" * 41), "text/plain")
    assert await store.put(_once(b"a" * 60), "text/plain") == first
    await store.put(_once(b"b" * 40), "text/plain")
    with pytest.raises(BlobTooLarge):
        await store.put(_once(b"c" * 81), "text/plain")


async def test_what_many_upload_at_once_stays_within_the_quota() -> None:
    store = _limited(100)
    puts = (store.put(_once(bytes([i]) * 30), "text/plain") for i in range(10))
    outcomes = await asyncio.gather(*puts, return_exceptions=True)
    assert sum(not isinstance(outcome, Exception) for outcome in outcomes) == 3
    assert all(isinstance(outcome, BlobQuotaExceeded) for outcome in outcomes if isinstance(outcome, Exception))


async def test_room_comes_when_blobs_expire() -> None:
    store = BlobStore(
        MemoryStore(),
        max_bytes=80,
        ttl_s=100.0,
        lease_s=100.0,
        quota_bytes=100,
        clock=lambda: time.time() + 200,  # what is put now is over already
    )
    await store.put(_once(b"a" * 70), "text/plain")
    await store.sweep()
    await store.put(_once(b"b" * 70), "text/plain")


async def test_an_expired_blob_can_be_stored_again(blob_store: MemoryBlobs) -> None:
    await blob_store.store.put(_once(b"again"), "text/plain")
    counting = BlobStore(
        blob_store.objects, max_bytes=80, ttl_s=100.0, lease_s=100.0, quota_bytes=5, clock=blob_store.clock
    )
    blob_store.now = 200
    ref = await counting.put(_once(b"again"), "text/plain")
    blob_store.now = 0
    assert (await counting.head(ref.blob_id)).size == 5


async def test_a_quota_is_reported_over_http_in_the_log_and_as_a_metric(serve: Serve) -> None:
    registry = CollectorRegistry()
    served = await serve(BlobRoutes(_limited(100), metrics=BlobMetrics(registry)))
    async with HttpBlobs(served.url) as blobs:
        await blobs.store(b"a" * 70, "text/plain")
        with pytest.raises(BlobQuotaExceeded) as refused, capture_logs() as lines:
            await blobs.store(b"b" * 70, "text/plain")
    assert refused.value.retryable
    failures = [line for line in lines if line["event"] == "blob_store_failed"]
    assert failures
    assert all("blobs.quota_bytes" in line["hint"] for line in failures)
    assert registry.get_sample_value("tokenbus_blob_failures_total", {"code": "blob_quota_exceeded"}) == len(failures)


async def test_s3_gives_out_urls_that_need_no_token(s3_endpoint: str, serve: Serve) -> None:
    store = BlobStore(s3_store(s3_endpoint), max_bytes=1000, ttl_s=100.0, lease_s=100.0)
    served = await serve(BlobRoutes(store, token=TOKEN))
    async with HttpBlobs(served.url, token=TOKEN) as blobs, httpx.AsyncClient(timeout=60) as http:
        ref = await blobs.store(b"a picture", "image/png")
        link_url = f"{served.url}/blobs/{ref.blob_id}/link"
        bearer = {"Authorization": f"Bearer {TOKEN}"}
        assert (await http.get(link_url)).status_code == 401
        link = (await http.get(link_url, params={"seconds": "60"}, headers=bearer)).json()
        assert link["seconds"] == 60
        assert "X-Amz-Expires=60" in link["url"]
        assert (await http.get(link["url"])).content == b"a picture"
        for seconds in ("0", "3601", "-1", "x", ""):
            wrong = await http.get(f"{link_url}?seconds={seconds}&x=", headers=bearer)
            assert wrong.status_code == (200 if seconds == "" else 400)
        missing = await http.get(f"{served.url}/blobs/{blob_id_of(b'none')}/link", headers=bearer)
        assert missing.status_code == 404


async def test_a_store_without_urls_raises_an_error(local_store: MemoryBlobs, tmp_path: Path) -> None:
    ref = await local_store.store.put(_once(b"x"), "text/plain")
    with pytest.raises(BlobRefused, match="only S3"):
        await local_store.store.link(ref.blob_id, seconds=60)


async def _once(content: bytes):
    yield content
