"""MCP servers as child processes: listed, called, lost and found again, and gone with their executor."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
import structlog

from tests.services.tools.conftest import MemoryBlobs, call
from tests.services.tools.mcp.conftest import Notes, Start, alive, answer, stdio
from tests.waiting import eventually
from tokenbus.events.frames import ToolReported
from tokenbus_services.settings import McpStdio
from tokenbus_services.tools.executor import ToolExecutor


async def works_again(executor: ToolExecutor, name: str) -> None:
    async def works() -> bool:
        return not (await answer(executor, name, '{"text": "again"}')).is_error

    await eventually(works)


async def test_tools_are_listed_at_start_with_their_schemas_and_names_that_providers_take(start: Start) -> None:
    executor = await start(here=stdio())
    listed = {tool.name: tool for tool in executor.mcp.definitions["here"]}
    assert {"here__echo", "here__slow", "here__dotted_name"} <= listed.keys()
    assert listed["here__echo"].description == "Says it again."
    assert listed["here__echo"].parameters["required"] == ["text"]
    assert (await answer(executor, "here__dotted_name")).content == "dotted"


async def test_calls_run_side_by_side_and_give_their_text(start: Start) -> None:
    executor = await start(here=stdio())
    outcomes = await asyncio.gather(*(answer(executor, "here__echo", f'{{"text": "{n}"}}') for n in range(20)))
    assert [outcome.content for outcome in outcomes] == [str(n) for n in range(20)]


async def test_arguments_are_checked_against_the_listed_schema(start: Start) -> None:
    executor = await start(here=stdio())
    outcome = await answer(executor, "here__echo", '{"text": 5}')
    assert outcome.is_error
    assert "arguments.text" in outcome.content


async def test_a_result_of_too_many_parts_is_an_error_before_anything_is_made_of_them(start: Start) -> None:
    executor = await start(here=stdio())
    assert (await answer(executor, "here__parts", '{"count": 100}')).content == "\n".join(["x"] * 100)
    outcome = await answer(executor, "here__parts", '{"count": 5000}')
    assert (outcome.is_error, outcome.content) == (True, "MCP error -32603: over 4096 parts in `content`")
    assert (await answer(executor, "here__echo", '{"text": "again"}')).content == "again"


async def test_a_tool_that_no_server_lists_is_an_error(start: Start) -> None:
    executor = await start(here=stdio())
    outcome = await answer(executor, "here__nothing")
    assert (outcome.is_error, "unknown tool" in outcome.content) == (True, True)


async def test_an_error_of_the_tool_is_an_error_result_with_its_text_and_no_secret(start: Start) -> None:
    executor = await start(here=stdio(env_pass=("SECRET",)))
    outcome = await answer(executor, "here__fail", '{"why": "no such street, very-secret"}')
    assert outcome.is_error
    assert "no such street" in outcome.content
    assert "very-secret" not in outcome.content


async def test_the_server_sees_the_variables_that_are_passed_and_no_others(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIVATE", "yes")
    executor = await start(here=stdio(env_pass=("SECRET", "NOTES")))
    assert (await answer(executor, "here__variable", '{"name": "SECRET"}')).content == "[redacted]"
    assert (await answer(executor, "here__variable", '{"name": "NOTES"}')).content.startswith("/")
    assert (await answer(executor, "here__variable", '{"name": "PRIVATE"}')).content == "not set"


async def test_an_image_is_stored_as_a_blob_and_its_note_is_in_the_text(start: Start, blobs: MemoryBlobs) -> None:
    executor = await start(here=stdio())
    outcome = await answer(executor, "here__picture")
    [blob_id] = blobs.contents
    assert blobs.contents[blob_id] == b"\x89PNG none"
    assert blobs.media_types[blob_id] == "image/png"
    assert outcome.content == f"Look:\n[9 bytes of image/png, stored as blob {blob_id}]"


async def test_a_long_text_is_cut_and_kept_whole(start: Start, blobs: MemoryBlobs) -> None:
    executor = await start(limit=200, here=stdio())
    outcome = await answer(executor, "here__echo", '{"text": "' + "x" * 1000 + '"}')
    assert len(outcome.content) <= 200
    assert blobs.contents[outcome.blob_id or ""] == b"x" * 1000


async def test_a_call_that_takes_too_long_is_cancelled_at_the_server_and_its_progress_is_reported(
    start: Start, notes: Notes
) -> None:
    executor = await start(here=stdio(timeout_s=5.0))
    reports: list[ToolReported] = []

    async def deliver(report: ToolReported) -> None:
        reports.append(report)

    outcome = await executor.execute(call("here__slow"), deliver)
    assert outcome.is_error
    assert "within 5 s" in outcome.content
    await notes.has("cancelled")
    assert reports == [ToolReported(3, 1, 4, "one of four")]
    assert (await answer(executor, "here__echo", '{"text": "on"}')).content == "on"


async def test_a_cancelled_run_cancels_the_call_at_the_server(start: Start, notes: Notes) -> None:
    executor = await start(here=stdio())
    running = asyncio.create_task(executor.execute(call("here__slow")))
    await notes.has("began")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await notes.has("cancelled")


async def test_a_killed_server_gives_error_results_at_once_and_works_again(start: Start, notes: Notes) -> None:
    executor = await start(here=stdio())
    running = asyncio.create_task(executor.execute(call("here__slow")))
    await notes.has("began")
    os.kill(notes.pids[0], signal.SIGKILL)
    lost = await asyncio.wait_for(running, 60)
    assert (lost.is_error, "Connection closed" in lost.content) == (True, True)
    meanwhile = await asyncio.wait_for(executor.execute(call("here__echo", '{"text": "x"}')), 60)
    assert (meanwhile.is_error, "not running" in meanwhile.content) == (True, True)
    await works_again(executor, "here__echo")
    assert len(notes.pids) == 2


async def test_the_list_is_read_again_when_the_server_says_that_it_changed(start: Start) -> None:
    executor = await start(here=stdio())
    assert (await answer(executor, "here__late")).is_error
    assert (await answer(executor, "here__grow")).content == "grown"

    async def there() -> bool:
        return (await answer(executor, "here__late")).content == "late"

    await eventually(there)
    assert "here__late" in {tool.name for tool in executor.mcp.definitions["here"]}


async def test_a_server_that_never_answers_delays_a_call_no_longer_than_its_timeout(start: Start) -> None:
    executor = await start(silent_server=stdio(script="import sys\nfor line in sys.stdin: pass", connect_timeout_s=0.5))
    assert executor.mcp.definitions == {}
    assert (await answer(executor, "silent_server__any")).is_error


async def test_a_missing_command_does_not_affect_the_other_servers(start: Start) -> None:
    executor = await start(here=stdio(), gone=McpStdio(command="no-such-command-anywhere"))
    assert (await answer(executor, "here__echo", '{"text": "x"}')).content == "x"
    assert list(executor.mcp.definitions) == ["here"]


async def test_a_server_that_does_not_start_is_tried_again_later_each_time(start: Start) -> None:
    with structlog.testing.capture_logs() as logs:
        await start(gone=McpStdio(command="no-such-command-anywhere"))
        await eventually(lambda: len([e for e in logs if e["event"] == "mcp_server_unavailable"]) >= 3)
    pauses = [entry["again_in_s"] for entry in logs if entry["event"] == "mcp_server_unavailable"]
    assert pauses[:3] == [0.25, 0.5, 1.0]


async def test_a_message_without_end_is_not_gathered(start: Start) -> None:
    endless = "import sys\nwhile True: sys.stdout.write('x' * 65536)"
    with structlog.testing.capture_logs() as logs:
        await start(message_bytes=100_000, loud=stdio(script=endless))
    [away, *_] = [entry for entry in logs if entry["event"] == "mcp_server_unavailable"]
    assert away["server"] == "loud"


async def test_a_result_over_the_bound_is_an_error_and_the_server_is_restarted(start: Start, notes: Notes) -> None:
    executor = await start(message_bytes=50_000, limit=10**6, here=stdio())
    outcome = await answer(executor, "here__echo", '{"text": "' + "x" * 60_000 + '"}')
    assert outcome.is_error
    await works_again(executor, "here__echo")
    assert len(notes.pids) == 2


async def test_a_child_that_ignores_the_end_is_killed_with_its_own_children(start: Start, notes: Notes) -> None:
    stubborn = f"""
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
open({str(notes.path)!r}, "a").write(f"pid {{os.getpid()}}\\npid {{child.pid}}\\n")
time.sleep(300)
"""
    executor = await start(stubborn=stdio(script=stubborn, connect_timeout_s=2.0))
    await eventually(lambda: len(notes.pids) >= 2)
    await executor.close()
    await eventually(lambda: not any(alive(pid) for pid in notes.pids))
