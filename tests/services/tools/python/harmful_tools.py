"""Tools that keep the interpreter's lock, take memory, end their process or print without end."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import threading
import time
from pathlib import Path

from tokenbus.tools import Image, ToolContext

_count = 0


def backtrack() -> str:
    """Keeps the interpreter's lock: the match takes longer than anybody's life."""
    return str(re.match(r"(a|a)*b", "a" * 60))


def sleep_with_lock() -> str:
    """Keeps the interpreter's lock, and takes no time of the CPU."""
    ctypes.PyDLL(None).sleep(3600)
    return "never"


def pid() -> str:
    return str(os.getpid())


def count() -> int:
    """How many calls this process had."""
    global _count  # noqa: PLW0603
    _count += 1
    return _count


def touch(file: str) -> str:
    """Says its process in a file, and ends once the file is gone."""
    Path(file).write_text(str(os.getpid()))
    while Path(file).exists():
        time.sleep(0.005)
    return "gone"


def exit_now() -> None:
    os._exit(3)


def exit_once(file: str) -> str:
    """Leaves a thread behind that ends the process, which it returns, once a later call made this file."""

    def wait() -> None:
        while not Path(file).exists():
            time.sleep(0.005)
        os._exit(3)

    threading.Thread(target=wait, daemon=True).start()
    return str(os.getpid())


def die_by_signal() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def allocate() -> int:
    """Takes memory without end."""
    return len([bytearray(b"x" * 2**22) for _ in range(10_000)])


def hoard(size: int) -> str:
    """Leaves memory behind."""
    globals()["_hoard"] = bytearray(size)
    return "kept"


def prints(lines: int, text: str = "hello") -> str:
    for _ in range(lines):
        print(text)
    return "printed"


async def clean_up(file: str) -> None:
    """Writes to a file when it is cancelled."""
    Path(file).write_text("running")  # noqa: ASYNC240
    try:
        await asyncio.Event().wait()
    finally:
        Path(file).write_text("cleaned up")  # noqa: ASYNC240


def leave_child(file: str) -> str:
    """Starts a process that would outlive it."""
    if (child := os.fork()) == 0:
        time.sleep(600)
        os._exit(0)
    Path(file).write_text(str(child))
    os._exit(3)


def leave_session(file: str) -> str:
    """Starts a process in a session of its own, whose parent is gone."""
    if (child := os.fork()) == 0:
        os.setsid()
        if (grandchild := os.fork()) == 0:
            time.sleep(600)
        Path(file).write_text(str(grandchild))
        os._exit(0)
    os.waitpid(child, 0)
    return "left"


def kill_parent() -> str:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)
    return "never"


def kill_fork_server() -> str:
    """What no guard prevents: it looks for the process."""
    status = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
    os.kill(int(status[1]), signal.SIGKILL)
    time.sleep(60)
    return "never"


def env(name: str) -> str:
    return os.environ.get(name, "")


def report(context: ToolContext) -> list[object]:
    context.report(1, 2, "half")
    time.sleep(0.1)
    return [context.run, Image(b"\x89PNG", "image/png"), {"left": context.remaining_s > 0}]
