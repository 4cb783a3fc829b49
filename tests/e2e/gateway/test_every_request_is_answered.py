"""Every request to every route is answered: with one id, errors in the form of the surface, and never a bare 500."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Generator

import msgspec
import pytest

from tests.e2e.gateway.served import gateway_routes
from tokenbus.testing import LocalBus, Reply
from tokenbus_services.gateway.keys.key import new_key
from tokenbus_services.net.request_guard import PAGES

KEY = new_key()
KEYED = f"""
[console]
[gateway]
keep_alive_s = 0.2
early_status_s = 0.2
body_bytes = 100000
[gateway.keys.me]
sha256 = "{KEY.sha256}"
operator = true
console = ["see_content", "act", "admin"]
"""
TRIES = 1500
ESCAPES = (
    *("%e2%82%ac", "%0d%0a", "%0d%0aset-cookie:%20a=b", "%00", "%ff%fe", "%ed%a0%80", "%2e%2e%2f", "%25", "%", "%zz"),
    *("..", "a%2fb", "a" * 3000, "%f0%9f%98%80", "r1", "%7f", "%c2%85", "{", "'", "%22", "resp_%e2%82%ac", "a:b@c"),
)
METHODS = ("GET", "GET", "POST", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "BREW", "get")
HEADERS = (
    *("x-request-id: mine", "x-request-id: a b", "accept: text/event-stream", "accept: \xff\xfe", "last-event-id: 99"),
    *("last-event-id: \u00b2", "last-event-id: -9999999999999999999999", "anthropic-version: 1", "x-goog-api-key: k"),
    *("idempotency-key: \xe4", "idempotency-key: ", "traceparent: 00-x", "content-encoding: gzip", "cookie: a=\xff"),
    *("content-type: text/plain", "if-none-match: \xff", "origin: null", "x-tokenbus-run: \xe4", "range: bytes=z-"),
    *("x-console-ticket: \xff", "x-console-csrf: \xe4", "cookie: tokenbus_console=AAAA", "transfer-encoding: chunked"),
    *("connection: close", "expect: 100-continue", "upgrade: h2c", "x-forwarded-proto: \xff", "x-api-key: \x01"),
)
QUERIES = (
    *("", "", "?", "?key=a", "?wait=true", "?after=%00", "?after=-1", "?offset=9999999999999999&live=sse"),
    *(
        "?stream=true",
        "?limit=1e9",
        "?%ff=%ff",
        "?state=%e2%82%ac",
        "?older_than=nan",
        "?older_than=1e999",
    ),
    *("?cursor=99999999999999999", "?offset=now&live=long-poll&offset=1", "?starting_after=x", "?after=1-%0d%0a"),
    *("?ticket=%ff", "?tenant=%00", "?alt=sse"),
)
USER = [{"role": "user", "content": "hello"}]
BODIES: tuple[bytes, ...] = (
    *(
        b"",
        b"{}",
        b"[]",
        b"null",
        b"{",
        b'"\xff"',
        b"\xff\xfe",
        b"[" * 5000,
        b'{"model":"\\ud800"}',
    ),
    *(
        b'{"model":1e999}',
        b'{"id":' + b"9" * 5000 + b"}",
        b'{"model":"anthropic/text","messages":[{}]}',
        b'{"a":"\\u0000"}',
        b" " * 200_000,
    ),
    msgspec.json.encode({"model": "anthropic/text", "messages": USER, "max_tokens": 5}),
    msgspec.json.encode({"model": "anthropic/text", "messages": USER, "stream": True}),
    msgspec.json.encode({"model": "anthropic/text", "input": "hello", "previous_response_id": "resp_\u20ac"}),
    msgspec.json.encode({"model": "anthropic/text", "messages": USER, "id": "\u20ac\r\n", "metadata": {"a": "\x00"}}),
    msgspec.json.encode({"model": "anthropic/text", "messages": USER, "tokenbus": {"run": "\u20ac\r\nx: y"}}),
    msgspec.json.encode({"id": "\u20ac", "messages": USER, "trigger": "submit-message", "model": "anthropic/text"}),
    msgspec.json.encode({"runId": "\u20ac\r\n", "threadId": "t", "messages": USER, "tools": [], "context": []}),
    msgspec.json.encode({"contents": [{"parts": [{"text": "hi"}]}]}),
    msgspec.json.encode({"key": "tb-\x00", "run": "\u20ac", "reason": "\u20ac" * 2000, "heard_through": 1e30}),
)


@pytest.fixture(scope="module", params=["keyed", "keyless"])
def bus(request: pytest.FixtureRequest) -> Generator[LocalBus]:
    settings = KEYED if request.param == "keyed" else KEYED.partition("[gateway.keys.me]")[0]
    with LocalBus(settings) as running:
        running.model_says("text", Reply(text="one two"))
        yield running


async def exchange(port: int, data: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
    """Send a request, and read its answer until it ends or, of a stream, until it begins."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    try:
        writer.write(data)
        async with asyncio.timeout(30):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                status = int(head.split(b" ", 2)[1])
                if status >= 200:
                    break
            lines = head.decode("latin-1").split("\r\n")[1:-2]
            headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
            given = dict(headers)
            body = b""
            if given.get("content-type", "").startswith("text/event-stream") or data.startswith(b"HEAD"):
                pass
            elif "content-length" in given:
                body = await reader.readexactly(int(given["content-length"]))
            elif given.get("transfer-encoding") == "chunked":
                while size := int(await reader.readline(), 16):
                    body += (await reader.readexactly(size + 2))[:-2]
            return status, headers, body
    finally:
        writer.close()


def request_of(rng: random.Random, path: str) -> bytes:
    target = re.sub(r"\{[^}]*\}", lambda _: rng.choice(ESCAPES), path)
    if rng.random() < 0.1:
        target += "/" + rng.choice(ESCAPES)
    body = rng.choice(BODIES)
    headers = [line for line in HEADERS if rng.random() < 0.06]
    if rng.random() < 0.9:
        headers.append(f"authorization: Bearer {KEY.text}")
    if any(line.startswith("transfer-encoding") for line in headers):
        content = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"
    else:
        headers.append(f"content-length: {len(body)}")
        content = body
    method = rng.choice(METHODS)
    if method in ("GET", "HEAD") and rng.random() < 0.9:
        headers = [line for line in headers if not line.startswith(("content-length", "transfer-encoding"))]
        content = b""
    lines = [f"{method} {target}{rng.choice(QUERIES)} HTTP/1.1", "host: 127.0.0.1", *headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + content


def fault(asked: bytes, status: int, headers: list[tuple[str, str]], body: bytes) -> str:
    """What is wrong with an answer; empty if nothing is."""
    given = dict(headers)
    path = asked.split(b" ", 2)[1].partition(b"?")[0].decode("latin-1")
    named = [value for name, value in headers if name == "x-request-id"]
    before_routing = given.get("content-type") == "application/json" and b"invalid_http" in body
    if status >= 500:
        return "a defect"
    if len(named) != 1 and not before_routing:
        return f"{len(named)} ids"
    if any(text in body for text in (b"Traceback", b"codec can", b"recursion depth", b"object at 0x", b"Error(")):
        return "a text of Python"
    preflight = asked.startswith(b"OPTIONS") and status == 403
    if status < 400 or asked.startswith(b"HEAD") or preflight:
        return ""
    if path.startswith("/api/chat"):
        return "" if body and given["content-type"].startswith("text/plain") else "not the text that useChat shows"
    if not given.get("content-type", "").startswith("application/json"):
        return "not JSON"
    error = msgspec.json.decode(body)
    error = error[0] if isinstance(error, list) else error
    if "error" not in error:
        return "no error"
    if path.startswith("/anthropic/") and not before_routing:
        right = error.get("type") == "error" and error.get("request_id") == named[0]
    elif path.startswith(("/gemini/", "/v1beta/")) and not before_routing:
        right = str(error["error"].get("status")).isupper()
    else:
        right = True
    return "" if right and error["error"]["message"] and "code" in error["error"] else "not in the form of its surface"


@pytest.mark.parametrize("seed", range(2))
async def test_no_path_escape_method_header_or_body_is_left_without_an_answer(bus: LocalBus, seed: int) -> None:
    rng = random.Random(f"every-request-{seed}")
    port = int(bus.gateway.rpartition(":")[2])
    paths = sorted({*PAGES, *(path for _, path in gateway_routes(console=True))})
    assert len(paths) > 60
    assert {"/metrics", "/runs/{run}", "/console/api/session", "/v1beta/{rest:path}", "/api/chat"} <= {*paths}
    asked = [request_of(rng, rng.choice(paths)) for _ in range(TRIES)]
    gate = asyncio.Semaphore(8)

    async def one(data: bytes) -> str:
        async with gate:
            try:
                status, headers, body = await exchange(port, data)
            except (asyncio.IncompleteReadError, TimeoutError, ConnectionError) as e:
                return f"no answer ({type(e).__name__}): {data[:400]!r}"
        wrong = fault(data, status, headers, body)
        return wrong and f"{wrong}: {status} {body[:200]!r} {headers} to {data[:400]!r}"

    wrong = [each for each in await asyncio.gather(*(one(data) for data in asked)) if each]
    assert not wrong, f"{len(wrong)} of {TRIES}:\n" + "\n".join(wrong[:20])
