"""Runs every command of docs/guides/any-language.md against the running bus.

So do the README and docs/reference/requests.md: their lines for redis-cli are among these.
"""

from __future__ import annotations

import json
import re
import threading
from base64 import b64encode
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from tests.clients.plain import Execute, by_redis_cli, by_socket, command_line, commands
from tests.unit.docs.pages import page, sections
from tests.waiting import eventually_sync
from tokenbus.bus.keys import Keys
from tokenbus.errors import RunError
from tokenbus.testing import LocalBus, Reply, Stall, Turn

TEXT = page("guides/any-language.md")
PAGE = sections(TEXT)
README = Path(__file__).parents[2] / "README.md"
NEEDS_CLI = pytest.mark.skipif(command_line() is None, reason="no redis-cli and no valkey-cli on this machine")


@pytest.fixture(
    params=[pytest.param(by_redis_cli, marks=NEEDS_CLI, id="redis-cli"), pytest.param(by_socket, id="socket")]
)
def execute(request: pytest.FixtureRequest) -> Execute:
    return request.param


@pytest.fixture
def bus() -> Generator[LocalBus]:
    with LocalBus() as local:
        local.model_says("any", Reply(thinking="Rain?", text="Yes, take it along."))
        local.model_says("slow", Turn(says=Reply(text="Once upon a time"), fault=Stall(after_text="upon")))
        yield local


def section(name: str) -> list[str]:
    """The commands under one heading, in order."""
    return commands(PAGE[name])


def events(reply: list[str]) -> list[dict[str, Any]]:
    return [json.loads(text) for text in reply if text.startswith("{")]


def ids(reply: list[str]) -> list[str]:
    return [text for text in reply if re.fullmatch(r"\d+-\d+", text)]


def ended(bus: LocalBus, run: str) -> None:
    """Wait for the run's end, however it ends."""
    with bus.sync_client() as client, suppress(RunError):
        client.result(run)


def test_the_line_of_the_page_on_requests_is_one_of_these() -> None:
    assert commands(page("reference/requests.md")) == section("Publish")[:1]


def umbrella(bus: LocalBus, execute: Execute) -> None:
    """The run of the page's section on publishing, to its end."""
    execute(bus.url, section("Publish")[0])
    ended(bus, "umbrella")


def two_runs(bus: LocalBus, execute: Execute) -> None:
    """That run and another one of its partition."""
    umbrella(bus, execute)
    with bus.sync_client() as client:
        client.publish({**bus.request("any"), "id": "story-1"}).result()


def test_every_command_of_the_page_is_in_a_section_that_is_tried_here() -> None:
    tried = {
        "Find the partitions": 1,
        "Publish": 2,
        "Follow one run": 3,
        "Cancel": 3,
        "Subscribe to all runs": 3,
        "Share the work in a group": 6,
        "What is kept": 1,
        "Errors": 4,
    }
    assert {name: len(commands(text)) for name, text in PAGE.items() if commands(text)} == tried
    assert sum(tried.values()) == len(commands(TEXT))


def test_the_partitions_of_the_page_are_those_of_the_code() -> None:
    examples = re.findall(r"^\| `(\S+)` \| (\d+) \| (\d+) \|$", TEXT, re.MULTILINE)
    assert len(examples) == 5
    for run, crc, partition in examples:
        assert (int(crc), int(partition)) == (crc32(run.encode()), Keys(partitions=8).partition_of(run)), run


def test_every_key_of_a_run_on_the_page_has_the_tag_of_its_partition() -> None:
    named = re.findall(r"tokenbus:\{(\d)\}:(?:log|run):([\w-]+)", TEXT)
    assert {run for _, run in named} == {"umbrella", "story-1", "wrong-1"}
    for partition, run in named:
        assert Keys(partitions=8).partition_of(run) == int(partition), run


def test_the_number_of_partitions_is_found(bus: LocalBus, execute: Execute) -> None:
    assert execute(bus.url, section("Find the partitions")[0]) == ["8", "1"]


def test_a_run_is_published_and_followed_without_a_gap(bus: LocalBus, execute: Execute) -> None:
    umbrella(bus, execute)
    assert execute(bus.url, section("Publish")[1])[0].isdigit()
    whole, rest, status = (execute(bus.url, line) for line in section("Follow one run"))
    encoded = events(whole)
    assert [event["seq"] for event in encoded] == list(range(len(encoded)))
    assert ids(whole) == [f"{event['attempt']}-{event['seq']}" for event in encoded]
    assert "".join(e["text"] for e in encoded if e["type"] == "chunk" and e["visible"]) == "Yes, take it along."
    assert encoded[-1]["type"] == "completed"
    assert events(rest) == encoded[3:]
    assert status == ["completed"]


def test_a_run_is_cancelled(bus: LocalBus, execute: Execute) -> None:
    publish, cancel, read = section("Cancel")
    execute(bus.url, publish)
    eventually_sync(lambda: [exchange.state for exchange in bus.exchanges] == ["stalled"])
    execute(bus.url, cancel)
    ended(bus, "story-1")
    last = events(execute(bus.url, read))[-1]
    assert (last["type"], last["reason"], last["heard_through"]) == ("cancelled", "the user left", -1)
    eventually_sync(lambda: bus.exchanges[0].state == "disconnected")


def heard_live(bus: LocalBus, execute: Execute, line: str, partition: int) -> list[dict[str, Any]]:
    """What a read that waits for what is new gets, while runs of one partition come."""
    reply: list[str] = []
    reading = threading.Thread(target=lambda: reply.extend(execute(bus.url, line)))
    reading.start()
    runs = (f"live-{n}" for n in range(100_000) if Keys().partition_of(f"live-{n}") == partition)
    with bus.sync_client() as client:
        while reading.is_alive():
            client.publish({**bus.request("any"), "id": next(runs)}).result()
            reading.join(0.1)
    return events(reply)


@pytest.mark.parametrize("partition", [0, 7])
def test_the_line_of_the_readme_reads_every_partition(bus: LocalBus, execute: Execute, partition: int) -> None:
    (line,) = commands(README.read_text())
    assert line == section("Subscribe to all runs")[0]
    received = heard_live(bus, execute, line, partition)
    assert received
    assert {event["type"] for event in received} == {"chunk"}


def test_all_partitions_of_a_topic_are_read_from_the_oldest_entry(bus: LocalBus, execute: Execute) -> None:
    runs = [f"run-{n}" for n in range(12)]
    assert {Keys().partition_of(run) for run in runs} == set(range(8))
    with bus.sync_client() as client:
        for run in [client.publish({**bus.request("any"), "id": run}) for run in runs]:
            run.result()
    umbrella(bus, execute)
    _, newest, everything = section("Subscribe to all runs")
    assert [event["run"] for event in events(execute(bus.url, newest))] == ["umbrella"]
    received = dict.fromkeys([*runs, "umbrella"], "")
    for event in events(execute(bus.url, everything)):
        received[event["run"]] += event["text"]
    assert set(received.values()) == {"Yes, take it along."}


def test_a_group_shares_acknowledges_and_takes_over(bus: LocalBus, execute: Execute) -> None:
    two_runs(bus, execute)
    create, take, ack, pending, take_again, claim = section("Share the work in a group")
    assert execute(bus.url, create) == ["OK"]
    first = execute(bus.url, take)
    assert len(events(first)) == 1
    assert execute(bus.url, ack.replace(" ID", f" {ids(first)[0]}")) == ["1"]
    assert execute(bus.url, pending)[0] == "0"
    second = execute(bus.url, take_again)
    assert ids(second)[0] != ids(first)[0]
    assert events(execute(bus.url, claim)) == events(second)


def test_a_gap_shows_as_nothing_kept_up_to_a_position(bus: LocalBus, execute: Execute) -> None:
    two_runs(bus, execute)
    (request,) = section("What is kept")
    entries = ids(execute(bus.url, "XRANGE tokenbus:{6}:visible - +"))
    assert len(entries) > 1
    assert ids(execute(bus.url, request.replace(" ID ", f" {entries[0]} "))) == entries[:1]
    execute(bus.url, "XTRIM tokenbus:{6}:visible MAXLEN 1")
    assert ids(execute(bus.url, request.replace(" ID ", f" {entries[0]} "))) == []


def test_an_invalid_request_is_reported(bus: LocalBus, execute: Execute) -> None:
    wrong, read, unreadable, dead = section("Errors")
    execute(bus.url, wrong)
    ended(bus, "wrong-1")
    (failed,) = events(execute(bus.url, read))
    assert failed["type"] == "failed"
    assert failed["error"]["class"] == "invalid_request"
    assert failed["error"]["where"]
    execute(bus.url, unreadable)
    eventually_sync(lambda: b64encode(b"no JSON").decode() in " ".join(execute(bus.url, dead)))
