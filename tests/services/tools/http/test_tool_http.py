"""HTTP tools against a real server on a loopback port."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.services.tools.conftest import MakeExecutor, MemoryBlobs, call, until
from tests.unit.docs.pages import page
from tokenbus.blobs import blob_id_of
from tokenbus_services.net.http_client import MAX_CRUMBS
from tokenbus_services.settings import HttpTool
from tokenbus_services.tools.executor import ToolExecutor, ToolOutcome


class Seen(NamedTuple):
    """One request as the endpoint saw it."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


Respond = Callable[[asyncio.StreamWriter], Awaitable[None]]


class Endpoint:
    """An HTTP endpoint that notes its requests and answers each with ``respond``."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.open = 0
        """Connections."""
        self.respond: Respond = answer(200, b"ok")
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            method, target, _ = head[0].split(" ")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
            body = await reader.readexactly(int(headers.get("content-length", "0")))
            self.seen.append(Seen(method, target, headers, body))
            await self.respond(writer)
            if not writer.is_closing():
                await reader.read()  # until the client is done
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            self.open -= 1


def answer(status: int, body: bytes = b"", *headers: str) -> Respond:
    async def respond(writer: asyncio.StreamWriter) -> None:
        lines = [f"HTTP/1.1 {status} Reason", f"Content-Length: {len(body)}", "Connection: close", *headers, "", ""]
        writer.write("\r\n".join(lines).encode() + body)
        await writer.drain()

    return respond


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    endpoint = Endpoint()
    server = await asyncio.start_server(endpoint.serve, "127.0.0.1", 0)
    endpoint.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield endpoint
    server.close()
    await until(lambda: endpoint.open == 0)


@pytest.fixture
def tool(endpoint: Endpoint, make_executor: MakeExecutor) -> Callable[..., ToolExecutor]:
    def make(
        path: str = "/run", limit: int = 1000, env: dict[str, str] | None = None, **settings: object
    ) -> ToolExecutor:
        declared = HttpTool(url=endpoint.url + path, allow_private=True, **settings)  # type: ignore[arg-type]
        return make_executor({"t": declared}, limit=limit, env=env)

    return make


MakeTool = Callable[..., ToolExecutor]


@pytest.mark.parametrize("method", ["POST", "PUT"])
async def test_arguments_are_the_json_body_and_the_answer_is_the_result(
    tool: MakeTool, endpoint: Endpoint, method: Literal["POST", "PUT"]
) -> None:
    endpoint.respond = answer(201, "größer".encode(), "Content-Type: text/plain; charset=utf-8")
    outcome = await tool(method=method).execute(call("t", '{"city": "Oslo",  "days": [1, 2]}'))
    assert outcome == ToolOutcome("größer")
    (seen,) = endpoint.seen
    assert (seen.method, seen.target) == (method, "/run")
    assert json.loads(seen.body) == {"city": "Oslo", "days": [1, 2]}
    assert seen.headers["content-type"] == "application/json"


async def test_an_endpoint_gets_the_trace_context_of_its_call(tool: MakeTool, endpoint: Endpoint) -> None:
    traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    executor = tool()
    await executor.execute(call("t", traceparent=traceparent))
    await executor.execute(call("t"))
    assert [seen.headers.get("traceparent") for seen in endpoint.seen] == [traceparent, None]


async def test_get_carries_the_arguments_in_the_query(tool: MakeTool, endpoint: Endpoint) -> None:
    arguments = {"q": "a b&c=d", "n": 3, "deep": {"x": [True]}}
    await tool("/find?lang=en", method="GET").execute(call("t", json.dumps(arguments)))
    (seen,) = endpoint.seen
    query = parse_qs(urlsplit(seen.target).query)
    assert query == {"lang": ["en"], "q": ["a b&c=d"], "n": ["3"], "deep": ['{"x":[true]}']}
    assert seen.body == b""


async def test_headers_come_from_the_settings_and_the_environment(tool: MakeTool, endpoint: Endpoint) -> None:
    executor = tool(
        headers={"X-Team": "birds"}, header_env={"Authorization": "BIRD_AUTH"}, env={"BIRD_AUTH": "Bearer s3cret-value"}
    )
    await executor.execute(call("t"))
    assert endpoint.seen[0].headers["x-team"] == "birds"
    assert endpoint.seen[0].headers["authorization"] == "Bearer s3cret-value"


def documented_verify() -> Callable[..., dict[str, Any]]:
    """The function that the guide shows for writing an endpoint."""
    [code] = [
        block for block in page("guides/tools.md").split("```python\n") if "def verify(" in block.partition("```")[0]
    ]
    scope: dict[str, Any] = {}
    exec(code.partition("```")[0], scope)
    return scope["verify"]


@pytest.mark.parametrize("method", ["POST", "GET"])
async def test_a_signed_call_names_its_run_and_any_change_of_it_is_refused(
    tool: MakeTool, endpoint: Endpoint, method: Literal["POST", "GET"], tmp_path: Path
) -> None:
    file = tmp_path / "secret"
    file.write_text("the-endpoints-secret\n")
    executor = tool("/run?lang=de", method=method, signing_env="SECRET", env={"SECRET_FILE": str(file)})
    metadata = {"tenant": "acme", "user": {"id": 7, "name": "Zoë"}}
    await executor.execute(call("t", '{"q": "ü b&c"}', tenant="acme", metadata=metadata))
    [seen] = endpoint.seen
    verify, who = documented_verify(), (seen.method, seen.target, seen.headers, seen.body)
    assert verify("the-endpoints-secret", *who) == {
        "run": "r1",
        "turn": 2,
        "tool_id": "call_1",
        "tool": "t",
        "tenant": "acme",
        "metadata": metadata,
    }
    other = json.loads(base64.urlsafe_b64decode(seen.headers["tokenbus-run"])) | {"tenant": "other"}
    forged = base64.urlsafe_b64encode(json.dumps(other).encode()).decode()
    for changed in (
        ("another-secret", *who),
        ("the-endpoints-secret", "PUT", *who[1:]),
        ("the-endpoints-secret", seen.method, f"{seen.target}&more=1", seen.headers, seen.body),
        ("the-endpoints-secret", seen.method, seen.target, {**seen.headers, "tokenbus-run": forged}, seen.body),
        ("the-endpoints-secret", seen.method, seen.target, {**seen.headers, "tokenbus-timestamp": "1"}, seen.body),
        ("the-endpoints-secret", seen.method, seen.target, {}, seen.body),
        ("the-endpoints-secret", seen.method, seen.target, seen.headers, seen.body + b" "),
        ("the-endpoints-secret", *who, time.time() + 301),
    ):
        with pytest.raises(PermissionError):
            verify(*changed)


async def test_metadata_that_does_not_fit_a_header_is_left_out_and_unsigned_calls_have_none(
    tool: MakeTool, endpoint: Endpoint
) -> None:
    asked = call("t", tenant="acme", metadata={"tenant": "acme", "notes": "x" * 5000})
    await tool(signing_env="SECRET", env={"SECRET": "the-endpoints-secret"}).execute(asked)
    await tool().execute(asked)
    signed, plain = endpoint.seen
    who = documented_verify()("the-endpoints-secret", signed.method, signed.target, signed.headers, signed.body)
    assert (who["tenant"], who["metadata"]) == ("acme", None)
    assert not any(name.startswith("tokenbus-") for name in plain.headers)


async def test_the_same_call_has_the_same_idempotency_key_and_another_call_another(
    tool: MakeTool, endpoint: Endpoint
) -> None:
    executor = tool()
    for block in (3, 3, 4):
        await executor.execute(call("t", block=block))
    assert [seen.headers["idempotency-key"] for seen in endpoint.seen] == ["r1/2/3", "r1/2/3", "r1/2/4"]


async def test_an_empty_answer_is_an_empty_result(tool: MakeTool, endpoint: Endpoint) -> None:
    endpoint.respond = answer(204)
    assert await tool().execute(call("t")) == ToolOutcome("")


@pytest.mark.parametrize("status", [400, 404, 500, 503])
async def test_a_refusal_is_an_error_with_status_and_the_beginning_of_its_body(
    tool: MakeTool, endpoint: Endpoint, status: int
) -> None:
    endpoint.respond = answer(status, b"no such city " + b"x" * 100_000)
    outcome = await tool(header_env={"X-Key": "K"}, env={"K": "such city"}).execute(call("t"))
    assert outcome.is_error
    assert outcome.content.startswith(f"HTTP {status} Reason: no [redacted] xxx")
    assert len(outcome.content) < 2100


async def test_a_redirect_is_not_followed(tool: MakeTool, endpoint: Endpoint) -> None:
    endpoint.respond = answer(307, b"", f"Location: {endpoint.url}/elsewhere")
    outcome = await tool().execute(call("t"))
    assert outcome == ToolOutcome("HTTP 307 Reason", is_error=True)
    assert len(endpoint.seen) == 1


async def test_an_endpoint_that_is_down_is_an_error(make_executor: MakeExecutor) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        outcome = await make_executor({"t": HttpTool(url=url, allow_private=True)}).execute(call("t"))
    assert outcome == ToolOutcome("ConnectError: [Errno 111] Connection refused", is_error=True)


async def test_an_answer_that_breaks_off_is_an_error_however_long(
    tool: MakeTool, endpoint: Endpoint, blobs: MemoryBlobs
) -> None:
    for size in (10, 100_000):

        async def cut(writer: asyncio.StreamWriter, size: int = size) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n" + b"x" * size)
            await writer.drain()
            writer.close()

        endpoint.respond = cut
        outcome = await tool().execute(call("t"))
        assert outcome.is_error
        assert outcome.content.startswith("RemoteProtocolError")
    assert blobs.contents == {}


async def test_nonsense_in_place_of_http_is_an_error(tool: MakeTool, endpoint: Endpoint) -> None:
    async def nonsense(writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.2\r\n\r\n")
        writer.close()

    endpoint.respond = nonsense
    outcome = await tool().execute(call("t"))
    assert outcome.is_error
    assert outcome.content.startswith("RemoteProtocolError")


async def test_a_large_answer_is_streamed_to_the_blob_store(
    tool: MakeTool, endpoint: Endpoint, blobs: MemoryBlobs
) -> None:
    body = "zwölf ".encode() * 100_000
    endpoint.respond = answer(200, body, "Content-Type: text/markdown; charset=utf-8")
    outcome = await tool(limit=500).execute(call("t"))
    assert outcome.blob_id == blob_id_of(body)
    assert blobs.contents == {blob_id_of(body): body}
    assert blobs.media_types == {blob_id_of(body): "text/markdown;charset=utf-8"}
    assert outcome.content.startswith("zwölf zwölf")
    assert len(outcome.content.encode()) <= 500


async def test_an_image_becomes_a_blob(tool: MakeTool, endpoint: Endpoint, blobs: MemoryBlobs) -> None:
    endpoint.respond = answer(200, b"\x89PNG\r\n\x1a\n", "Content-Type: image/png")
    outcome = await tool().execute(call("t"))
    assert outcome.blob_id == blob_id_of(b"\x89PNG\r\n\x1a\n")
    assert blobs.media_types == {outcome.blob_id: "image/png"}


async def test_a_media_type_that_is_none_is_not_passed_on(
    tool: MakeTool, endpoint: Endpoint, blobs: MemoryBlobs
) -> None:
    endpoint.respond = answer(200, b"\xff\xfe\xfd", "Content-Type: ../../etc; x")
    outcome = await tool().execute(call("t"))
    assert outcome.blob_id is not None
    assert blobs.media_types[outcome.blob_id] == "application/octet-stream"


async def test_an_answer_compressed_against_our_word_is_refused(tool: MakeTool, endpoint: Endpoint) -> None:
    endpoint.respond = answer(200, gzip.compress(b"0" * 10_000_000), "Content-Encoding: gzip")
    outcome = await tool().execute(call("t"))
    assert outcome == ToolOutcome("the response is compressed, which was not requested", is_error=True)
    assert endpoint.seen[0].headers["accept-encoding"] == "identity"


async def test_a_timeout_closes_the_connection(tool: MakeTool, endpoint: Endpoint) -> None:
    async def stall(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nx")
        await writer.drain()

    endpoint.respond = stall
    outcome = await tool(timeout_s=0.1).execute(call("t"))
    assert outcome == ToolOutcome("the tool returned no result within 0.1 s", is_error=True)
    await until(lambda: endpoint.open == 0)


async def test_a_cancelled_call_closes_the_connection(tool: MakeTool, endpoint: Endpoint) -> None:
    async def silent(writer: asyncio.StreamWriter) -> None:
        await writer.drain()

    endpoint.respond = silent
    task = asyncio.create_task(tool().execute(call("t")))
    await until(lambda: len(endpoint.seen) == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: endpoint.open == 0)


async def test_calls_to_an_endpoint_run_side_by_side(tool: MakeTool, endpoint: Endpoint) -> None:
    async def together(writer: asyncio.StreamWriter) -> None:
        await until(lambda: len(endpoint.seen) == 5)
        await answer(200, b"all five")(writer)

    endpoint.respond = together
    executor = tool()
    outcomes = await asyncio.gather(*(executor.execute(call("t", block=i)) for i in range(5)))
    assert outcomes == [ToolOutcome("all five")] * 5


async def test_small_parts_that_arrive_together_are_one_piece(tool: MakeTool, endpoint: Endpoint) -> None:
    async def crumbs(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(b"1\r\nx\r\n" * (MAX_CRUMBS + 2) + b"0\r\n\r\n")
        await writer.drain()

    endpoint.respond = crumbs
    outcome = await tool().execute(call("t"))
    assert not outcome.is_error
    assert f"{MAX_CRUMBS + 2} bytes" in str(outcome.content)
