"""What a worker logs."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

LOGS_A_STRANGERS_TEXT = r"""
import logging, structlog
from tokenbus_services.runtime import logs
logs.configure("info", service="tools")
structlog.get_logger().warning("tool_call_timed_out", tool="weather\x1b]0;owned\x07")
logging.getLogger("redis").warning("an error of %s", "redis\x1b[2J")
try:
    raise ValueError("\x9b2J")
except ValueError:
    structlog.get_logger().exception("failed")
"""


def test_on_a_terminal_no_control_character_of_a_stranger_gets_through() -> None:
    ours, theirs = pty.openpty()
    try:
        subprocess.run([sys.executable, "-c", LOGS_A_STRANGERS_TEXT], stderr=theirs, check=True)
    finally:
        os.close(theirs)
    shown = "".join(iter(lambda: _read(ours), ""))
    os.close(ours)
    assert "weather␛]0;owned␇" in shown
    assert "redis␛[2J" in shown
    assert "ValueError: \ufffd2J" in shown
    assert not [control for control in ("\x1b]", "\x1b[2J", "\x07", "\x9b") if control in shown]


LOGS_A_REMOVED_NODE = r"""
import asyncio, logging
from redis.asyncio.cluster import ClusterNode
from tokenbus_services.runtime import logs
logs.configure("info", service="gateway")

class Connected:
    is_connected = True

async def main():
    node = ClusterNode("127.0.0.1", 7001)
    node._connections.append(Connected())
    del node
    asyncio.get_running_loop().call_exception_handler({"message": "a task broke"})

asyncio.run(main())
"""


def test_a_node_that_left_the_cluster_is_no_error_and_a_defect_of_a_task_is() -> None:
    run = subprocess.run([sys.executable, "-c", LOGS_A_REMOVED_NODE], capture_output=True, text=True, check=True)
    (line,) = run.stderr.splitlines()
    assert "a task broke" in line


def _read(terminal: int) -> str:
    try:
        return os.read(terminal, 2**16).decode()
    except OSError:  # Linux's sign that no writer is left
        return ""
