"""Python tools in executors: what a call does to its process costs no other call."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.services.tools.conftest import MemoryBlobs, call
from tests.waiting import eventually
from tokenbus.bus.liveness import Liveness
from tokenbus.errors import SettingsError
from tokenbus.events.frames import ToolReported
from tokenbus_services.executor import processes
from tokenbus_services.executor.processes import End
from tokenbus_services.settings import LimitSettings, PythonTool, Settings
from tokenbus_services.tools.executor import ToolExecutor, ToolOutcome
from tokenbus_services.tools.python import executors as executors_module
from tokenbus_services.tools.python.executors import _EXITED, PythonExecutors

HARMFUL = "tests.services.tools.python.harmful_tools"
MEMORY_BYTES = 2**27
PROBES = 12


@asynccontextmanager
async def tools(*names: str, ends: list[End] | None = None, **timeouts: float) -> AsyncGenerator[ToolExecutor]:
    """An executor of these tools, with the timeouts that differ from a minute."""
    declared: dict[str, Any] = {
        name: PythonTool(call=f"{HARMFUL}:{name}", timeout_s=timeouts.get(name, 60.0)) for name in (*names, *timeouts)
    }
    settings = Settings(tools=declared, limits=LimitSettings(tool_memory_bytes=MEMORY_BYTES))
    made = ToolExecutor.from_settings(settings, on_end=(ends if ends is not None else []).append)
    made._results._blobs = MemoryBlobs()
    await made.open(Liveness())
    try:
        yield made
    finally:
        await made.close()


async def outcome(made: ToolExecutor, name: str, arguments: str = "{}") -> ToolOutcome:
    return await made.execute(call(name, arguments))


@pytest.mark.parametrize("guilty", ["backtrack", "sleep_with_lock"])
async def test_calls_that_keep_the_interpreters_lock_end_by_their_timeout_and_no_other_call_waits(guilty: str):
    ends: list[End] = []
    async with tools("pid", ends=ends, **{guilty: 3.0}) as made:
        stuck = [asyncio.create_task(outcome(made, guilty)) for _ in range(3)]
        for _ in range(PROBES):
            assert not (await outcome(made, "pid")).is_error
        assert not any(task.done() for task in stuck), "the others did not wait for them"
        for task in stuck:
            assert await task == ToolOutcome("the tool returned no result within 3 s", is_error=True)
        assert not (await outcome(made, "pid")).is_error
        await eventually(lambda: ends == ["overran"] * 3)
        await eventually(lambda: made.processes == 1)


async def test_a_call_whose_executor_is_killed_runs_once_more_and_no_other_notices(tmp_path: Path):
    ends: list[End] = []
    async with tools("touch", ends=ends) as made:
        files = [tmp_path / str(n) for n in range(4)]
        calls = [asyncio.create_task(outcome(made, "touch", f'{{"file": "{file}"}}')) for file in files]
        await eventually(lambda: all(file.exists() and file.read_text() for file in files))
        processes = [file.read_text() for file in files]
        for killed in (1, 2):
            os.kill(int(processes[killed]), signal.SIGKILL)
        await eventually(lambda: all(files[n].read_text() not in ("", processes[n]) for n in (1, 2)))
        os.kill(int(files[2].read_text()), signal.SIGKILL)
        assert await calls[2] == ToolOutcome("the tool's process ended during the call", is_error=True)
        for file in files:
            file.unlink()
        assert [(await calls[n]).content for n in (0, 1, 3)] == ["gone"] * 3
        assert ends == ["exited"] * 3


async def test_a_supervisor_that_asks_all_processes_to_stop_ends_no_call(tmp_path: Path):
    ends: list[End] = []
    file = tmp_path / "file"
    async with tools("pid", "touch", ends=ends) as made:
        running = asyncio.create_task(outcome(made, "touch", f'{{"file": "{file}"}}'))
        await eventually(lambda: file.exists() and bool(file.read_text()))
        executor = before = file.read_text()
        python = made._registry._executors
        assert python
        [process] = python._executors.processes
        for pid in (_server_of(made), process.guard, int(executor)):
            os.kill(pid, signal.SIGTERM)
        assert not (await outcome(made, "pid")).is_error, "the fork server forks still"
        assert file.read_text() == before
        file.unlink()
        assert await running == ToolOutcome("gone")
        assert ends == []


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("exit_now", "the tool's process ended during the call"),
        ("die_by_signal", "the tool's process ended during the call"),
        pytest.param(
            "allocate",
            "the tool's process took more memory than `limits.tool_memory_bytes`",
            marks=pytest.mark.skipif(sys.platform != "linux", reason="memory is bounded on Linux alone"),
        ),
    ],
)
async def test_a_call_that_ends_its_process_gets_an_error_result(name: str, problem: str):
    async with tools("pid", name) as made:
        assert await outcome(made, name) == ToolOutcome(problem, is_error=True)
        assert not (await outcome(made, "pid")).is_error


async def test_a_call_whose_process_an_earlier_call_ended_runs_again_in_a_new_one(tmp_path: Path):
    ends: list[End] = []
    file = tmp_path / "file"
    async with tools("exit_once", "touch", ends=ends) as made:
        first = (await outcome(made, "exit_once", f'{{"file": "{file}"}}')).content
        innocent = asyncio.create_task(outcome(made, "touch", f'{{"file": "{file}"}}'))

        def runs_again() -> bool:
            return bool(ends) and file.read_text() not in ("", first)  # empty while it is written

        await eventually(runs_again)
        file.unlink()
        assert await innocent == ToolOutcome("gone")
        assert ends == ["exited"]


async def test_a_call_whose_process_starts_as_all_are_stopped_gets_the_usual_error_result():
    async with tools("pid") as made:
        late = asyncio.create_task(outcome(made, "pid"))
        await eventually(lambda: made.processes == 1)
        await made.close()
        assert (await late).content in (_EXITED, "no process could be started for the call: it ended as it started")


async def test_an_executor_is_used_again_unless_a_call_left_much_memory_in_it():
    async with tools("count", "hoard") as made:
        assert [(await outcome(made, "count")).content for _ in range(3)] == ["1", "2", "3"]
        assert made.processes == 1
        await outcome(made, "hoard", f'{{"size": {MEMORY_BYTES // 2}}}')
        assert (await outcome(made, "count")).content == "1"


async def test_an_executor_without_calls_ends_after_a_while(monkeypatch: pytest.MonkeyPatch):
    ends: list[End] = []
    async with tools("pid", ends=ends) as made:
        await outcome(made, "pid")
        monkeypatch.setattr(executors_module, "IDLE_S", 0.0)
        await eventually(lambda: made.processes == 0)
        assert ends == []


async def test_a_cancelled_coroutine_cleans_up_and_its_executor_is_used_again(tmp_path: Path):
    file = tmp_path / "file"
    ends: list[End] = []
    async with tools("clean_up", ends=ends) as made:
        running = asyncio.create_task(outcome(made, "clean_up", f'{{"file": "{file}"}}'))
        await eventually(lambda: file.exists() and file.read_text() == "running")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await eventually(lambda: file.read_text() == "cleaned up")
        python = made._registry._executors
        assert python
        await eventually(lambda: len(python._idle) == 1)
        assert ends == []


async def test_a_process_that_a_call_started_ends_with_its_executor(tmp_path: Path):
    file = tmp_path / "pid"
    async with tools("leave_child") as made:
        assert (await outcome(made, "leave_child", f'{{"file": "{file}"}}')).is_error
        await eventually(lambda: _is_gone(int(file.read_text())))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives orphans to another than init")
@pytest.mark.parametrize("then", ["the next call", "the end of its executor", "the end of the worker"])
async def test_a_process_in_a_session_of_its_own_does_not_outlive_the_executor_of_its_call(tmp_path: Path, then: str):
    file = tmp_path / "pid"
    async with tools("leave_session", "count") as made:
        assert (await outcome(made, "leave_session", f'{{"file": "{file}"}}')).content == "left"
        left = int(file.read_text())
        if then == "the next call":
            assert (await outcome(made, "count")).content == "1"
        elif then == "the end of its executor":
            await eventually(lambda: made.processes == 0)
        if then != "the end of the worker":
            await eventually(lambda: _is_gone(left))
    await eventually(lambda: _is_gone(left))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere an executor does not end with its parent")
async def test_a_call_that_kills_its_parent_is_ended_at_once_and_no_other_notices(tmp_path: Path):
    ends: list[End] = []
    file = tmp_path / "file"
    async with tools("touch", "kill_parent", ends=ends) as made:
        innocent = asyncio.create_task(outcome(made, "touch", f'{{"file": "{file}"}}'))
        await eventually(lambda: file.exists() and bool(file.read_text()))
        before, server = file.read_text(), _server_of(made)
        assert await outcome(made, "kill_parent") == ToolOutcome(_EXITED, is_error=True)
        assert (file.read_text(), _server_of(made)) == (before, server)
        file.unlink()
        assert await innocent == ToolOutcome("gone")
        assert ends == ["exited"] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
async def test_a_call_that_finds_and_kills_the_fork_server_is_ended_after_a_few_times():
    async with tools("kill_fork_server") as made:
        assert await outcome(made, "kill_fork_server") == ToolOutcome(_EXITED, is_error=True)


def _is_gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:  # nobody may have waited for it
            return stat.read().rpartition(")")[2].split()[0] in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return True


async def test_context_images_progress_and_environment_reach_a_tool_in_its_executor(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SAMPLE_VARIABLE", "its value")
    reports: list[ToolReported] = []

    async def deliver(report: ToolReported) -> None:
        reports.append(report)

    async with tools("report", "env") as made:
        shown = await made.execute(call("report"), deliver)
        assert not shown.is_error
        assert shown.content.splitlines()[0] == "r1"
        assert shown.content.splitlines()[-1] == '{"left":true}'
        assert [image.media_type for image in shown.images] == ["image/png"]
        assert reports == [ToolReported(3, 1.0, 2.0, "half")]
        assert (await outcome(made, "env", '{"name": "SAMPLE_VARIABLE"}')).content == "its value"


async def test_what_a_tool_prints_is_logged_by_its_name_up_to_a_bound(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processes, "CHARS_PER_S", 0)  # else the bound depends on how long the calls take
    with capture_logs() as logs:

        def printed(key: str) -> list[Any]:
            return [entry[key] for entry in logs if entry["event"] == "printed"]

        async with tools("prints") as made:
            await outcome(made, "prints", '{"lines": 2}')
            await eventually(lambda: len(printed("text")) == 2)
            assert (printed("of"), printed("text")) == (["prints"] * 2, ["hello"] * 2)
            await outcome(made, "prints", '{"lines": 20000}')
            await asyncio.gather(
                *(outcome(made, "prints", f'{{"lines": 1, "text": "{"y" * 5000}"}}') for _ in range(9))
            )
    assert sum(map(len, printed("text"))) <= processes.BURST_CHARS
    assert max(map(len, printed("text"))) <= processes.LINE_CHARS


async def test_a_tool_that_cannot_be_loaded_is_an_error_of_the_settings_at_start():
    settings = Settings(tools={"t": PythonTool(call="no_such_module:function")})
    made = ToolExecutor.from_settings(settings)
    with pytest.raises(SettingsError, match="no_such_module") as refused:
        await made.open(Liveness())
    assert refused.value.where == "tools.t.call"
    await made.close()


@pytest.mark.parametrize("forking", [False, True])
async def test_calls_survive_the_loss_of_the_fork_server(tmp_path: Path, forking: bool):
    """``forking``: an executor that it was just forking has its socket still."""
    ends: list[End] = []
    file = tmp_path / "file"
    async with tools("touch", ends=ends) as made:
        running = asyncio.create_task(outcome(made, "touch", f'{{"file": "{file}"}}'))
        await eventually(lambda: file.exists() and bool(file.read_text()))
        before = file.read_text()
        server = _server_of(made)
        assert server
        ours, its = socket.socketpair()
        os.kill(server, signal.SIGKILL)
        if forking:
            ours.setblocking(False)
            _socket_of(made, ours).close()
        await eventually(lambda: running.done() or file.read_text() not in ("", before))
        file.unlink()
        assert await running == ToolOutcome("gone")
        assert ends == []
        ours.close()
        its.close()


def _socket_of(made: ToolExecutor, instead: socket.socket) -> socket.socket:
    """The worker's end of the fork server's socket, which is replaced."""
    python = made._registry._executors
    assert python
    server = python._executors._server
    assert server
    assert server._sock
    sock, server._sock = server._sock, instead
    return sock


def _server_of(made: ToolExecutor) -> int:
    python: PythonExecutors | None = made._registry._executors
    assert python
    process = python._executors._server and python._executors._server._process
    return process.pid if process else 0


async def test_a_host_that_cannot_fork_gives_calls_an_error_result(monkeypatch: pytest.MonkeyPatch):
    async with tools("pid") as made:
        python = made._registry._executors
        assert python

        async def refuse(process: object) -> None:
            raise BlockingIOError("no more processes")

        monkeypatch.setattr(python._executors, "_fork", refuse)
        refused = await outcome(made, "pid")
        assert refused == ToolOutcome("no process could be started for the call: no more processes", is_error=True)


async def test_no_file_stays_open_of_a_call_however_it_ended_or_if_it_could_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    touch = f'{{"file": "{tmp_path / "file"}"}}'
    async with tools("pid", "exit_now", "touch", sleep_with_lock=0.5) as made:
        before = _open_files()
        for room in range(5):  # one more each time, so that each of an executor's five files is once the refused one
            with _few_files(room):
                refused = await outcome(made, "pid")
            assert refused.content.startswith("no process could be started")
        cancelled = [asyncio.create_task(outcome(made, "touch", touch)) for _ in range(8)]
        for task in cancelled:  # each one step later in the start of its executor
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.wait(cancelled)
        await asyncio.gather(*(outcome(made, name) for name in ["pid"] * 8 + ["exit_now", "sleep_with_lock"] * 3))
        running = asyncio.create_task(outcome(made, "pid"))
        os.kill(_server_of(made), signal.SIGKILL)
        await running
        monkeypatch.setattr(executors_module, "IDLE_S", 0.0)
        await eventually(lambda: made.processes == 0)
        await eventually(lambda: _open_files() == before)


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def _few_files(room: int) -> Generator[None]:
    """Let this process open only this many files more."""
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(64)]  # so that no number below the limit is free
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(files) + 1, hard))
    for fd in files[:room]:
        os.close(fd)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in files[room:]:
            os.close(fd)
