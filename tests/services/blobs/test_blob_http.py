"""The blob service over real connections, and its client."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator

import httpx
import msgspec
import pytest

from tokenbus.blobs import BlobRef, blob_id_of
from tokenbus.errors import (
    BlobCorrupt,
    BlobError,
    BlobNotFound,
    BlobRefused,
    BlobStoreFull,
    BlobTooLarge,
    BlobUnavailable,
)
from tokenbus_services.blobs.client import HttpBlobs
from tokenbus_services.blobs.http import BlobRoutes, Receive, Scope, Send, WithBlobs

from .conftest import MAX_BYTES, MemoryBlobs, Serve, Served


@pytest.fixture
async def http(service: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=service.url, timeout=60) as client:
        yield client


@pytest.fixture
async def blobs(service: Served) -> AsyncIterator[HttpBlobs]:
    async with HttpBlobs(service.url, max_bytes=MAX_BYTES) as client:
        yield client


async def raw(service: Served, request: bytes, *, half_close: bool = False) -> bytes:
    """Send these bytes over a socket of their own; the answer, to the end of the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
    writer.write(request)
    if half_close:
        writer.write_eof()
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


def head(method: str, path: str, *headers: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", "Connection: close", *headers, "", ""]).encode(
        "latin-1"
    )


@pytest.mark.parametrize("method", ["PUT", "POST"])
async def test_an_upload_is_answered_with_its_address(http: httpx.AsyncClient, method: str) -> None:
    answer = await http.request(method, "/blobs", content=b"\x89PNG", headers={"Content-Type": "image/png"})
    assert answer.status_code == 201
    assert answer.json() == {"blob_id": blob_id_of(b"\x89PNG"), "media_type": "image/png", "size": 4}


async def test_a_streamed_upload_comes_back_with_type_length_and_etag(http: httpx.AsyncClient) -> None:
    content = os.urandom(2 * 2**20)

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(content), 100_000):
            yield content[start : start + 100_000]

    put = await http.put("/blobs", content=pieces(), headers={"Content-Type": "audio/wav"})
    got = await http.get(f"/blobs/{put.json()['blob_id']}")
    assert got.status_code == 200
    assert got.content == content
    assert got.headers["content-type"] == "audio/wav"
    assert got.headers["content-length"] == str(len(content))
    assert got.headers["etag"] == f'"{blob_id_of(content)}"'
    assert got.headers["x-content-type-options"] == "nosniff"


async def test_head_returns_the_same_headers_without_the_content(http: httpx.AsyncClient) -> None:
    blob_id = (await http.put("/blobs", content=b"abc")).json()["blob_id"]
    answer = await http.head(f"/blobs/{blob_id}")
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-length"] == "3"
    assert answer.headers["content-type"] == "application/octet-stream"


async def test_a_known_etag_is_answered_without_the_content(http: httpx.AsyncClient) -> None:
    blob_id = (await http.put("/blobs", content=b"abc")).json()["blob_id"]
    same = await http.get(f"/blobs/{blob_id}", headers={"If-None-Match": f'"other", W/"{blob_id}"'})
    other = await http.get(f"/blobs/{blob_id}", headers={"If-None-Match": '"other"'})
    assert (same.status_code, same.content) == (304, b"")
    assert (other.status_code, other.content) == (200, b"abc")


async def test_an_upload_to_an_address_must_have_that_content(http: httpx.AsyncClient, blob_store: MemoryBlobs) -> None:
    wrong = await http.put(f"/blobs/{blob_id_of(b'this')}", content=b"that")
    assert (wrong.status_code, wrong.json()["code"]) == (400, "blob_refused")
    assert blob_store.everything() == []
    right = await http.put(f"/blobs/{blob_id_of(b'this')}", content=b"this")
    assert right.status_code == 201


async def test_an_unknown_blob_is_404(http: httpx.AsyncClient) -> None:
    answer = await http.get(f"/blobs/{blob_id_of(b'nobody')}")
    assert answer.status_code == 404
    assert answer.json() == {"code": "blob_not_found", "message": f"no blob {blob_id_of(b'nobody')}"}


async def test_an_upload_that_a_stop_cuts_off_is_answered_and_is_no_error_in_the_log(
    local_store: MemoryBlobs, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    service = await serve(BlobRoutes(local_store.store))
    reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
    writer.write(b"PUT /blobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\nhalf")
    await service.begun()
    for task in service.tasks:
        task.cancel()
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503")
    assert b"blob_unavailable" in await reader.readuntil(b"}")
    writer.close()
    await service.idle()
    assert caplog.records == []


async def test_of_a_blob_whose_reader_left_no_more_is_read(
    local_store: MemoryBlobs, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Endless:
        async def chunks(self) -> AsyncIterator[bytes]:
            while True:
                await asyncio.sleep(0)
                yield bytes(2**16)

    async def open_endless(*_: object) -> Endless:
        return Endless()

    ref = await local_store.store.put(once(b"content"), "text/plain")
    monkeypatch.setattr(local_store.store, "open", open_endless)
    service = await serve(BlobRoutes(local_store.store))
    reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
    writer.write(b"GET /blobs/%b HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" % ref.blob_id.encode())
    await reader.readuntil(b"\r\n\r\n")
    writer.close()
    await service.idle()


async def once(content: bytes) -> AsyncIterator[bytes]:
    yield content


async def test_a_deleted_blob_is_gone_with_its_lease_and_may_be_put_again(http: httpx.AsyncClient) -> None:
    put = (await http.put("/blobs", content=b"gone")).json()["blob_id"]
    assert (await http.post(f"/blobs/{put}/lease")).status_code == 204
    assert (await http.delete(f"/blobs/{put}")).status_code == 204
    statuses = [(await http.request(method, f"/blobs/{put}")).status_code for method in ("GET", "DELETE")]
    assert statuses == [404, 404]
    assert (await http.put("/blobs", content=b"gone")).status_code == 201
    assert (await http.get(f"/blobs/{put}")).content == b"gone"


@pytest.mark.parametrize(("method", "path"), [("PATCH", "/blobs/x"), ("GET", "/blobs"), ("POST", "/blobs/x")])
async def test_other_methods_are_405_with_the_allowed_methods(http: httpx.AsyncClient, method: str, path: str) -> None:
    answer = await http.request(method, path)
    assert (answer.status_code, answer.json()["code"]) == (405, "method_not_allowed")
    assert "PUT" in answer.headers["allow"]


@pytest.mark.parametrize(
    "path",
    [
        "/blobs/../../../etc/passwd",
        "/blobs/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
        "/blobs/sha256:" + "a" * 64 + "%0a",
        "/blobs/sha256:" + "a" * 63 + "/",
        "/blobs//etc/passwd",
        "/blobs/sha256%00",
        "/blobs/" + "a" * 5000,
    ],
)
async def test_a_path_that_is_no_id_is_400(service: Served, path: str) -> None:
    answer = await raw(service, head("GET", path))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'"code":"blob_refused"' in answer


@pytest.mark.parametrize(
    "media_type",
    ["text", "text/", "/plain", "te xt/plain", "text/plain; a", "a/b/c", "image/..", "x/" + "y" * 200, "é/a"],
)
async def test_what_is_no_media_type_is_415(service: Served, blob_store: MemoryBlobs, media_type: str) -> None:
    answer = await raw(service, head("PUT", "/blobs", f"Content-Type: {media_type}", "Content-Length: 1") + b"x")
    assert answer.startswith(b"HTTP/1.1 415 ")
    assert b'"code":"blob_refused"' in answer
    assert blob_store.everything() == []


async def test_an_encoded_upload_is_415(http: httpx.AsyncClient) -> None:
    answer = await http.put("/blobs", content=b"x", headers={"Content-Encoding": "gzip"})
    assert answer.status_code == 415


async def test_an_upload_declared_too_large_is_413_before_any_of_it_is_sent(
    service: Served, blob_store: MemoryBlobs
) -> None:
    answer = await raw(service, head("PUT", "/blobs", f"Content-Length: {MAX_BYTES + 1}", "Expect: 100-continue"))
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"100 Continue" not in answer
    assert blob_store.everything() == []


async def test_an_upload_of_unknown_length_over_the_limit_is_413(blobs: HttpBlobs, blob_store: MemoryBlobs) -> None:
    async def long() -> AsyncIterator[bytes]:
        for _ in range(MAX_BYTES // 2**20 + 4):
            yield b"x" * 2**20

    with pytest.raises(BlobTooLarge) as refused:
        await blobs.store(long(), "text/plain")
    assert refused.value.limit == MAX_BYTES
    assert blob_store.everything() == []


@pytest.mark.parametrize(
    "sent",
    [
        head("PUT", "/blobs", "Content-Length: 100000") + b"x" * 50_000,
        head("PUT", "/blobs", "Transfer-Encoding: chunked") + b"5\r\nhello\r\n",
        head("PUT", "/blobs", "Transfer-Encoding: chunked") + b"ffff\r\nhello",
    ],
    ids=["declared", "between chunks", "inside a chunk"],
)
@pytest.mark.parametrize("reset", [True, False])
async def test_a_client_that_disconnects_leaves_no_task_or_connection(
    service: Served, blob_store: MemoryBlobs, sent: bytes, reset: bool
) -> None:
    """``reset``: as a killed process with unread data does it, with RST in place of FIN."""
    connection = socket.create_connection(("127.0.0.1", service.port))
    connection.sendall(sent)
    await service.begun()
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    connection.close()
    await service.idle()
    assert blob_store.everything() == []


async def test_a_body_shorter_than_declared_is_not_stored(service: Served, blob_store: MemoryBlobs) -> None:
    await raw(service, head("PUT", "/blobs", "Content-Length: 10") + b"short", half_close=True)
    await service.idle()
    assert blob_store.everything() == []


async def test_a_body_longer_than_declared_is_stored_up_to_there(service: Served, blob_store: MemoryBlobs) -> None:
    answer = await raw(service, head("PUT", "/blobs", "Content-Length: 5") + b"hello, smuggled")
    assert blob_id_of(b"hello").encode() in answer
    assert len(blob_store.everything()) == 1


async def test_broken_chunk_framing_is_not_stored(service: Served, blob_store: MemoryBlobs) -> None:
    framed = head("PUT", "/blobs", "Transfer-Encoding: chunked") + b"5\r\nhello\r\nnot-hex\r\n"
    answer = await raw(service, framed)
    await service.idle()
    assert not answer.startswith(b"HTTP/1.1 2")
    assert blob_store.everything() == []


async def test_a_length_that_a_server_did_not_check_is_checked(blob_store: MemoryBlobs) -> None:
    """Other ASGI servers may pass on a body whose length differs from its head."""
    messages = iter([{"type": "http.request", "body": b"short", "more_body": False}])
    sent: list[dict[str, object]] = []

    async def receive() -> dict[str, object]:
        return next(messages)

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "PUT", "path": "/blobs", "headers": [(b"content-length", b"10")]}
    await BlobRoutes(blob_store.store)(scope, receive, send)  # type: ignore[arg-type]
    assert sent[0]["status"] == 400
    assert blob_store.everything() == []


async def test_a_stalled_upload_is_given_up(blob_store: MemoryBlobs, serve: Serve) -> None:
    service = await serve(BlobRoutes(blob_store.store, idle_s=0.05))
    answer = await raw(service, head("PUT", "/blobs", "Content-Length: 10") + b"short")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"no data for 0.05 s" in answer
    assert blob_store.everything() == []


async def test_the_same_content_uploaded_twice_at_once_is_stored_once(
    blobs: HttpBlobs, blob_store: MemoryBlobs
) -> None:
    content = os.urandom(2 * 2**20)
    refs = await asyncio.gather(*(blobs.store(content, "image/png") for _ in range(6)))
    assert set(refs) == {BlobRef(blob_id=blob_id_of(content), media_type="image/png", size=len(content))}
    assert len(blob_store.everything()) == 1
    assert await blobs.load(refs[0].blob_id) == content


async def test_the_blob_routes_take_their_paths_and_no_other(blob_store: MemoryBlobs, serve: Serve) -> None:
    async def rest(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 299, "headers": []})
        await send({"type": "http.response.body", "body": scope["path"].encode()})

    service = await serve(WithBlobs(rest, BlobRoutes(blob_store.store)))
    async with httpx.AsyncClient(base_url=service.url, timeout=60) as http:
        for path in ("/health", "/blobsy", "/", "/x/blobs"):
            assert (await http.get(path)).text == path
        assert (await http.put("/blobs", content=b"x")).status_code == 201


async def test_a_scope_other_than_http_goes_to_the_app(blob_store: MemoryBlobs) -> None:
    seen: list[str] = []

    async def rest(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["type"])

    app = WithBlobs(rest, BlobRoutes(blob_store.store))
    await app({"type": "lifespan"}, None, None)  # type: ignore[arg-type]
    await app({"type": "websocket", "path": "/blobs"}, None, None)  # type: ignore[arg-type]
    assert seen == ["lifespan", "websocket"]


async def test_rotten_bytes_never_arrive_as_a_whole_blob(local_store: MemoryBlobs, serve: Serve) -> None:
    service = await serve(BlobRoutes(local_store.store))
    async with HttpBlobs(service.url) as blobs:
        ref = await blobs.store(b"x" * 2**20, "text/plain")
        (stored,) = local_store.everything()
        assert local_store.root is not None
        (local_store.root / stored).write_bytes(b"y" * 2**20)
        with pytest.raises(BlobCorrupt) as corrupt:
            await blobs.load(ref.blob_id)
        assert str(corrupt.value).count("sha256:") == 1
        with pytest.raises(BlobCorrupt):
            async for _ in blobs.chunks(ref.blob_id):
                pass


async def test_the_client_streams_and_loads(blobs: HttpBlobs) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"one, "
        yield b"two"

    ref = await blobs.store(pieces(), "Text/Plain; charset=utf-8")
    assert (ref.media_type, ref.size) == ("text/plain;charset=utf-8", 8)
    assert await blobs.load(ref.blob_id) == b"one, two"


async def test_content_that_breaks_off_in_the_client_is_its_own_error_and_leaves_nothing(
    blobs: HttpBlobs, service: Served, blob_store: MemoryBlobs
) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"x" * 2**20
        raise LookupError("the source broke off")

    with pytest.raises(LookupError, match="broke off"):
        await blobs.store(broken(), "text/plain")
    await service.idle()
    assert blob_store.everything() == []


async def test_the_client_raises_the_errors_of_the_service(blobs: HttpBlobs) -> None:
    with pytest.raises(BlobNotFound):
        await blobs.load(blob_id_of(b"nobody"))
    with pytest.raises(BlobRefused):
        await blobs.load("../etc/passwd")
    with pytest.raises(BlobRefused):
        await blobs.store(b"x", "nonsense")
    with pytest.raises(BlobTooLarge):
        await blobs.store(b"x" * (MAX_BYTES + 1), "text/plain")


async def test_the_client_loads_no_more_than_its_limit(service: Served, blobs: HttpBlobs) -> None:
    ref = await blobs.store(b"x" * 1000, "text/plain")
    async with HttpBlobs(service.url, max_bytes=999) as careful:
        with pytest.raises(BlobTooLarge):
            await careful.load(ref.blob_id)


async def test_a_service_that_is_down_is_unavailable() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        async with HttpBlobs(f"http://127.0.0.1:{unused.getsockname()[1]}") as blobs:
            with pytest.raises(BlobUnavailable):
                await blobs.store(b"x", "text/plain")
            with pytest.raises(BlobUnavailable):
                await blobs.load(blob_id_of(b"x"))


@pytest.mark.parametrize(
    ("status", "answer", "error"),
    [
        (507, msgspec.json.encode({"code": "blob_store_full", "message": "no room"}), BlobStoreFull),
        (503, msgspec.json.encode({"code": "blob_unavailable", "message": "s3"}), BlobUnavailable),
        (502, b"<html>Bad gateway</html>", BlobUnavailable),
        (201, b"<html>a captive portal</html>", BlobUnavailable),
        (200, b"not the content", BlobCorrupt),
    ],
)
async def test_a_strange_answer_is_an_error(serve: Serve, status: int, answer: bytes, error: type[BlobError]) -> None:
    async def strange(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": answer})

    service = await serve(strange)
    async with HttpBlobs(service.url) as blobs:
        with pytest.raises(error):
            await (blobs.load(blob_id_of(b"x")) if status == 200 else blobs.store(b"x", "text/plain"))


async def test_an_error_without_end_is_not_waited_for(serve: Serve) -> None:
    async def left(receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 502, "headers": []})
        leaving = asyncio.create_task(left(receive))
        while not leaving.done():
            await send({"type": "http.response.body", "body": bytes(2**16), "more_body": True})
            await asyncio.sleep(0)

    service = await serve(endless)
    async with HttpBlobs(service.url) as blobs:
        with pytest.raises(BlobUnavailable, match="HTTP 502"):
            await blobs.store(b"x", "text/plain")
        with pytest.raises(BlobUnavailable, match="HTTP 502"):
            await blobs.load(blob_id_of(b"x"))
        with pytest.raises(BlobUnavailable, match="HTTP 502"):
            await anext(blobs.chunks(blob_id_of(b"x")))


@pytest.mark.parametrize(("error", "status"), [(BlobStoreFull, 507), (BlobUnavailable, 503)])
async def test_a_failing_store_is_answered_with_its_code(
    http: httpx.AsyncClient,
    blob_store: MemoryBlobs,
    monkeypatch: pytest.MonkeyPatch,
    error: type[BlobUnavailable],
    status: int,
) -> None:
    async def failing(*_: object, **__: object) -> BlobRef:
        raise error("put", "the disk")

    monkeypatch.setattr(blob_store.store, "put", failing)
    answer = await http.put("/blobs", content=b"x")
    assert (answer.status_code, answer.json()["code"]) == (status, error.code)
