"""A process of the fork server is like one that was started, and none outlives the tests."""

from __future__ import annotations

import asyncio
import atexit
import gc
import json
import os
import random
import resource
import signal
import sys
import tempfile
import threading
from asyncio.subprocess import PIPE
from collections.abc import Generator
from pathlib import Path
from typing import Any

import prometheus_client
import pytest

from tests.fork_server import ROOT, Forked, ForkServer, template
from tests.waiting import eventually

_PARENT = """
import sys
from pathlib import Path
from tests.fork_server import ForkServer
server, log = ForkServer(), Path(sys.argv[1])
started = server.start("--version", stdout=log, stderr=log, prepare=("tests.e2e.test_fork_server:stay",))
print(started.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def server() -> Generator[ForkServer]:
    with template() as address, ForkServer(at=address) as server:
        yield server


def facts() -> dict[str, Any]:
    """What a process can know of itself that another one may have left it."""
    descriptors = {int(name) for name in os.listdir("/proc/self/fd")}
    alive = {number for number in descriptors if os.path.exists(f"/proc/self/fd/{number}")}  # less the one that listed
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    try:
        asyncio.get_running_loop()
        loop = True
    except RuntimeError:
        loop = False
    return {
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "descriptors": sorted(alive),
        "stdin": os.readlink("/proc/self/fd/0"),
        "signals": {
            signal.Signals(number).name: str(getattr(handler := signal.getsignal(number), "__name__", handler))
            for number in signal.valid_signals()
            if number < signal.SIGRTMIN
        },
        "caught and blocked": [status[name] for name in ("SigBlk", "SigIgn", "SigCgt")],
        "leads its session": os.getsid(0) == os.getpid(),
        "threads": threading.active_count(),
        "event loop": loop,
        "collector": gc.isenabled(),
        "temporary directory": tempfile.gettempdir(),
        "open files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "metrics": prometheus_client.generate_latest(prometheus_client.REGISTRY).decode().count("tokenbus"),
    }


def write_facts(file: str) -> None:
    Path(file).write_text(json.dumps(facts()))


def write_random(file: str) -> None:
    Path(file).write_text(str(random.random()))


def fail() -> None:
    raise ValueError("not today")


def stay() -> None:
    signal.pause()


def work_after_the_end(file: str) -> None:
    def finish() -> None:
        threading.main_thread().join()
        atexit.register(Path(file).write_text, "at exit")  # only if threads are waited for before

    threading.Thread(target=finish).start()


def start(server: ForkServer, directory: Path, *arguments: str, hook: str = "", **more: Any) -> Forked:
    prepare = (f"{__name__}:{hook}", *arguments) if hook else ()
    command = ("--version",) if hook else arguments
    return server.start(*command, stdout=directory / "out", stderr=directory / "err", prepare=prepare, **more)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process so much of itself")
async def test_a_forked_process_finds_what_a_started_one_finds(server: ForkServer, tmp_path: Path) -> None:
    env = {
        "PATH": os.environ["PATH"],
        "LC_ALL": "C.UTF-8",
        "ITS_OWN": "value",
    }  # without a locale, an interpreter adds one
    forked = start(server, tmp_path, str(tmp_path / "forked"), hook="write_facts", env=env, cwd=tmp_path)
    assert await forked.wait() == 0, (tmp_path / "err").read_text()
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from {__name__} import write_facts; write_facts('started')"
    started = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code), env=env, cwd=tmp_path, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
    )
    assert await started.wait() == 0
    assert json.loads((tmp_path / "forked").read_text()) == json.loads((tmp_path / "started").read_text())


async def test_a_forked_process_is_a_command_with_output_and_exit_code(server: ForkServer, tmp_path: Path) -> None:
    assert await start(server, tmp_path, "--version").wait() == 0
    assert (tmp_path / "out").read_text().startswith("tokenbus ")
    assert await start(server, tmp_path, "no-such-command").wait() == 2
    assert (tmp_path / "err").read_text().startswith("error: No such command")


async def test_a_forked_process_that_raises_leaves_its_traceback(server: ForkServer, tmp_path: Path) -> None:
    assert await start(server, tmp_path, hook="fail").wait() == 1
    assert (tmp_path / "err").read_text().endswith("ValueError: not today\n")


async def test_a_forked_process_ends_with_its_threads_and_then_what_is_registered_for_its_end(
    server: ForkServer, tmp_path: Path
) -> None:
    assert await start(server, tmp_path, str(tmp_path / "word"), hook="work_after_the_end").wait() == 0
    assert (tmp_path / "word").read_text() == "at exit"


async def test_forked_processes_draw_other_random_numbers(server: ForkServer, tmp_path: Path) -> None:
    files = [tmp_path / f"drawn{n}" for n in range(3)]
    for file in files:
        assert await start(server, tmp_path, str(file), hook="write_random").wait() == 0
    assert len({file.read_text() for file in files}) == len(files)


async def test_a_forked_process_is_stopped_continued_and_killed(server: ForkServer, tmp_path: Path) -> None:
    stays = start(server, tmp_path, hook="stay")
    stays.send_signal(signal.SIGSTOP)
    await eventually(lambda: _state(stays.pid) == "T")
    assert stays.returncode is None
    stays.send_signal(signal.SIGCONT)
    await eventually(lambda: _state(stays.pid) == "S")
    stays.kill()
    assert await stays.wait() == -signal.SIGKILL
    assert not _lives(stays.pid)


async def test_an_answer_that_nobody_read_is_not_taken_for_the_next(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("select.select", interrupted)
        with pytest.raises(KeyboardInterrupt):
            start(server, tmp_path, "--version")
    stays = start(server, tmp_path, hook="stay")
    assert _lives(stays.pid)
    stays.kill()
    assert await stays.wait() == -signal.SIGKILL


async def test_a_wait_for_a_process_that_keeps_running_has_a_timeout(server: ForkServer, tmp_path: Path) -> None:
    stays = start(server, tmp_path, hook="stay")
    with pytest.raises(AssertionError, match="has_ended did not come true within"):
        await stays.wait(timeout=0.05)
    stays.kill()
    await stays.wait()


async def test_a_closed_server_leaves_no_process_and_reports_the_ends_of_its_calls(tmp_path: Path) -> None:
    with ForkServer() as server:
        stays = start(server, tmp_path, hook="stay")
    assert stays.returncode == -signal.SIGKILL
    assert not _lives(stays.pid)


async def test_no_forked_process_outlives_a_parent_that_was_killed(tmp_path: Path) -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _PARENT, str(tmp_path / "log"), cwd=ROOT, stdin=PIPE, stdout=PIPE
    )
    assert parent.stdout
    forked = int(await parent.stdout.readline())
    assert _lives(forked)
    parent.kill()
    await parent.communicate()
    await eventually(lambda: not _lives(forked))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal")
async def test_no_forked_process_outlives_a_server_that_was_killed(tmp_path: Path) -> None:
    with ForkServer() as server:
        stays = start(server, tmp_path, hook="stay")
        os.kill(server.pid, signal.SIGKILL)
        await eventually(lambda: not _lives(stays.pid))
        with pytest.raises(AssertionError, match="the fork server ended with -9"):
            start(server, tmp_path, "--version")


def _lives(pid: int) -> bool:
    """Whether there is such a process, and not only its exit code."""
    return _state(pid) not in {"", "Z"}


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
