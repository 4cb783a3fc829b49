"""One process that has imported everything, and forks a worker on demand: 300 kills cost no 300 imports.

A worker is what `tokenbus worker KIND` runs, from the command line's own entry on. Orders come as JSON lines on
standard input; what was born and what died is told as JSON lines on standard output. When the input ends, all
workers are killed. ``python -m tests.chaos.zygote [BUILD]``; a build of `tests.chaos.broken` is for all workers.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import select
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Never

import msgspec

from tests.chaos.broken import BUILDS
from tokenbus_services.cli import commands, worker
from tokenbus_services.fetcher import app as _fetcher  # noqa: F401 - imported once, for all who are forked
from tokenbus_services.normalizer import app as _normalizer  # noqa: F401
from tokenbus_services.parser import app as _parser  # noqa: F401
from tokenbus_services.policy import app as _policy  # noqa: F401
from tokenbus_services.tools import app as _tools  # noqa: F401

LEFT_BEHIND = "left behind:"
"""How a worker's last line begins that ended with tasks or sockets still open."""
TELL = signal.SIGUSR1
"""On this signal a worker writes into its log where each of its tasks waits."""
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


class Order(msgspec.Struct):
    """Make a worker."""

    kind: str
    log: str
    env: dict[str, str]


class Born(msgspec.Struct, tag="born"):
    """The answer to an order; answers come in the order of the orders."""

    pid: int


class Died(msgspec.Struct, tag="died"):
    """A worker has ended; ``status`` as `subprocess` has it: negative for a signal."""

    pid: int
    status: int


Told = Born | Died


def main() -> None:
    """Serve orders until the input ends."""
    for build in sys.argv[1:]:
        BUILDS[build]()
    serve: Any = worker.serve
    worker.serve = _watched(serve)
    gc.freeze()  # what the workers share stays shared
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    living: set[int] = set()
    unread = b""
    while True:
        readable, _, _ = select.select([0, woken], [], [])
        if woken in readable:
            os.read(woken, 4096)
            _bury(living)
        if 0 in readable:
            data = os.read(0, 65536)
            if not data:
                break
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                order = msgspec.json.decode(line, type=Order)
                if not (pid := os.fork()):
                    _become(order)
                living.add(pid)
                _tell(Born(pid))
    for pid in living:
        os.kill(pid, signal.SIGKILL)


def _bury(living: set[int]) -> None:
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            living.discard(ended[0])
            _tell(Died(ended[0], os.waitstatus_to_exitcode(ended[1])))


def _tell(news: Told) -> None:
    os.write(1, msgspec.json.encode(news) + b"\n")


def _become(order: Order) -> Never:
    """In the child: run the command, with output of its own."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        log = os.open(order.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(order.env)
        commands.main(["worker", order.kind, "--port", "0"])
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _watched(serve: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """The service, and a look at what it leaves behind when it has stopped."""

    async def watched(*args: Any) -> None:
        sockets = _sockets()
        asyncio.get_running_loop().add_signal_handler(TELL, _tell_tasks)
        await serve(*args)
        await asyncio.sleep(0)  # transports that were closed in the last step are gone after it
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if tasks or (more := _sockets() - sockets) > 0:
            names = sorted(task.get_name() for task in tasks)
            print(LEFT_BEHIND, f"tasks {names}" if tasks else f"{more} sockets", flush=True)

    return watched


def _tell_tasks() -> None:
    for task in asyncio.all_tasks():
        waits_in: Any = task.get_coro()
        path: list[str] = []
        while waits_in is not None:
            frame = getattr(waits_in, "cr_frame", None) or getattr(waits_in, "ag_frame", None)
            path.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}" if frame else repr(waits_in))
            waits_in = getattr(waits_in, "cr_await", None) or getattr(waits_in, "ag_await", None)
        print(f"task {task.get_name()}:", " > ".join(path), flush=True)


def _sockets() -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return count


if __name__ == "__main__":
    main()
