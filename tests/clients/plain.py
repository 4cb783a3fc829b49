"""Command lines as a person types them into redis-cli, and two ways to run one: redis-cli itself, and a bare socket."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Callable
from contextlib import closing
from io import BufferedReader
from typing import Any
from urllib.parse import urlsplit

Execute = Callable[[str, str], list[str]]
"""Of a server's url and a line: the texts of the reply, in order, however deep they lay in it."""
BLOCKS = re.compile(r"^```redis\n(.*?)^```", re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[str]:
    """The lines of all blocks for redis-cli."""
    return [line for block in BLOCKS.findall(text) for line in block.splitlines()]


def command_line() -> str | None:
    """A redis-cli of this machine."""
    return shutil.which("redis-cli") or shutil.which("valkey-cli")


def by_redis_cli(url: str, line: str) -> list[str]:
    program = command_line()
    assert program
    done = subprocess.run([program, "-u", url], input=line, capture_output=True, text=True, timeout=60, check=True)
    return [text for text in done.stdout.splitlines() if text]


def by_socket(url: str, line: str) -> list[str]:
    """Send the line in the server's own protocol (RESP 2)."""
    at = urlsplit(url)
    words = [word.encode() for word in shlex.split(line)]
    with closing(socket.create_connection((at.hostname or "", at.port or 0), timeout=60)) as server:
        server.sendall(_command(words))
        with server.makefile("rb") as replies:
            return list(_texts(_reply(replies)))


def _command(words: list[bytes]) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


def _reply(replies: BufferedReader) -> Any:
    line = replies.readline()[:-2]
    kind, rest = line[:1], line[1:]
    if kind == b"-":
        raise AssertionError(rest.decode())
    if kind == b"$":
        return None if rest == b"-1" else replies.read(int(rest) + 2)[:-2].decode()
    if kind == b"*":
        return [_reply(replies) for _ in range(int(rest))]
    return rest.decode()


def _texts(reply: Any) -> list[str]:
    if isinstance(reply, list):
        return [text for one in reply for text in _texts(one)]
    return [] if reply is None else [str(reply)]
