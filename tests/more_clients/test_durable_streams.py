"""The conformance suite of Durable Streams at the gateway: its tests of reading at run logs, of writing at sessions."""

from __future__ import annotations

import asyncio
import re
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import uvicorn

from tests.clients import node
from tests.more_clients.durable_writer import SessionStreams, Writer
from tokenbus.bus.keys import Keys
from tokenbus.testing import LocalBus, Reply, Stall, Turn
from tokenbus_services.process.embedded_server import free_port

SOURCES = Path(__file__).parent
READING = (
    "Read Operations",
    "Long-Poll",
    "Browser Security Headers",
    "HEAD Metadata",
    "Offset Validation",
    "Caching and ETag",
    "Chunking and Large Payloads",
    "Read-Your-Writes Consistency",
    "SSE Mode",
    "JSON Mode",
    "Stream Closure HEAD",
    "Stream Closure Read",
    "Stream Closure Long-poll",
    "Stream Closure SSE",
    "HTTP Protocol should return correct headers on GET",
    "HTTP Protocol should return empty body",
    "HTTP Protocol should read from offset",
)
"""Beginnings of the names of the tests that are run."""
NOT_READING = re.compile(
    r"base64|binary|TTL|Expires-At|byte values|seq |sequence numbers|on (PUT|POST) responses", re.I
)
"""Of those, tests of what a run's log never is: bytes, streams that expire, and writers."""
FEWEST = 101
WRITING = (
    "Basic Stream Operations",
    "Append Operations",
    "HTTP Protocol",
    "JSON Mode",
    "Idempotent Producer Operations",
    "Property-Based Tests \\(fast-check\\) Sequence Ordering",
)
NOT_WRITING = re.compile(r"binary|byte", re.I)
"""Of those, tests of what a session never is: bytes."""
FEWEST_WRITTEN = 60


@pytest.fixture
def writer() -> Iterator[str]:
    """URL of the writer in front of a gateway."""
    with LocalBus('[gateway]\norigins = ["https://example.com"]\n') as bus:
        yield from served(lambda: Writer(bus.gateway, bus.url, Keys()))


@pytest.fixture
def sessions() -> Iterator[str]:
    """URL of streams that are sessions."""
    with LocalBus("[gateway]\n") as bus:
        bus.model_says("stalls", Turn(says=Reply(text="one two"), fault=Stall(after_text="one")))
        yield from served(lambda: SessionStreams(bus.gateway, bus.url, Keys(), model="anthropic/stalls"))


def served(make: Callable[[], Writer]) -> Iterator[str]:
    """The URL at which the streams are served, until the test has ended."""
    port, servers = free_port(), list[uvicorn.Server]()

    async def serve() -> None:
        writer = make()
        config = uvicorn.Config(writer.app, port=port, log_level="warning", lifespan="off")
        servers.append(uvicorn.Server(config))
        await servers[0].serve()
        await writer.aclose()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="writer of streams", daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{port}"
    servers[0].should_exit = True
    thread.join(30)


class _Test(msgspec.Struct, rename="camel"):
    full_name: str
    status: str
    failure_messages: list[str] = []


class _File(msgspec.Struct, rename="camel"):
    assertion_results: list[_Test]


class _Report(msgspec.Struct, rename="camel"):
    test_results: list[_File]


def run_of(url: str, names: Sequence[str], tmp_path: Path) -> list[_Test]:
    """The suite's tests whose names begin like this, with what became of them."""
    modules = node.packages(SOURCES)
    (tmp_path / "node_modules").symlink_to(modules)
    shutil.copy(SOURCES / "durable.test.mjs", tmp_path)
    report = tmp_path / "report.json"
    done = node.run(
        *(modules / "vitest" / "vitest.mjs", "run", "durable.test.mjs", "--testTimeout=300000"),
        *("--reporter=json", f"--outputFile={report}", "-t", f"^({'|'.join(names)})"),
        cwd=tmp_path,
        env={"CONFORMANCE_TEST_URL": url},
        timeout=600,
    )
    assert report.exists(), done.stdout + done.stderr
    (file,) = msgspec.json.decode(report.read_bytes(), type=_Report).test_results
    return [test for test in file.assertion_results if test.status not in ("skipped", "pending", "todo")]


@pytest.mark.parametrize(
    ("streams", "names", "others", "fewest"),
    [("writer", READING, NOT_READING, FEWEST), ("sessions", WRITING, NOT_WRITING, FEWEST_WRITTEN)],
    ids=["reading", "writing"],
)
def test_the_conformance_suite_passes(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    streams: str,
    names: Sequence[str],
    others: re.Pattern[str],
    fewest: int,
) -> None:
    run = run_of(request.getfixturevalue(streams), names, tmp_path)
    wanted = [test for test in run if not others.search(test.full_name)]
    failed = {test.full_name: test.failure_messages for test in wanted if test.status != "passed"}
    print(f"{len(wanted)} of {streams}:", Counter(test.status for test in wanted))
    assert not failed, failed
    assert len(wanted) >= fewest
