"""An event loop with virtual time, whose connections go to a real server.

The server is single-threaded. So each command is sent at its virtual time, alone, with an ECHO behind it. The server
writes replies at the end of a turn of its loop, the newest first. So once the ECHO is answered, and then a PING on a
connection of the loop's own, all replies that the command caused are known, those to blocked readers too. Behind a
command that may block, PINGs alone are that barrier. A blocking read waits without a limit on the server; the virtual
clock ends it. The server's clocks are virtual as well (clock.c): they stand between two commands.

A process may be stopped: its callbacks and what it receives wait until it goes on. What it has sent arrives.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import re
import select
import selectors
import socket
import subprocess
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from hashlib import sha1
from itertools import count
from pathlib import Path
from typing import Any, Self

PROCESS: ContextVar[str] = ContextVar("process", default="test")
"""Which simulated process the code runs in; tasks inherit it."""
BASE_S = 1_900_000_000
"""Unix time at which each simulation begins."""

_BLOCK = re.compile(rb"\r\n(?:BLOCK|block)\r\n\$\d+\r\n(\d+)\r\n")
_TURN_BYTES = 8 * 1024
_WRITE_BYTES = 32 * 1024
"""The server writes more than this of one reply in several turns."""
_PING = b"*1\r\n$4\r\nPING\r\n"
_ECHO = b"*2\r\n$4\r\nECHO\r\n$9\r\n\x00answered\r\n"
_ECHOED = b"$9\r\n\x00answered\r\n"


def command(*words: bytes | str | int) -> bytes:
    encoded = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return b"".join([b"*%d\r\n" % len(encoded), *(b"$%d\r\n%b\r\n" % (len(word), word) for word in encoded)])


class VirtualServer:
    """A server whose clocks show what a loop tells it, on a Unix socket alone. A context manager.

    It writes each command to its file before it answers, and may start again from a part of it.
    """

    def __init__(self, binary: Path, clock_library: Path, directory: Path) -> None:
        """``clock_library``: as `clock_library` builds it. ``directory``: empty."""
        self.path = str(directory / "socket")
        self._binary, self._library, self._directory = binary, clock_library, directory
        with (directory / "clock").open("w+b") as clock:
            clock.truncate(8)
            self.clock = mmap.mmap(clock.fileno(), 8)
        self.clock[:] = (BASE_S * 1_000_000).to_bytes(8, "little")
        self.kept = 0
        """Bytes in its file when it last said that all is on its disk."""
        self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._kill()
        self.clock.close()

    @property
    def written(self) -> int:
        """Bytes in its file."""
        return self._file.stat().st_size

    def restart(self, written: int) -> None:
        """Start it again as it was when so much was in its file, or all that it said is kept."""
        self._kill()
        os.truncate(self._file, max(written, self.kept))
        self._start()

    @property
    def _file(self) -> Path:
        (file,) = self._directory.glob("appendonlydir/*.incr.aof")
        return file

    def _start(self) -> None:
        self._server = subprocess.Popen(
            [
                *(str(self._binary), "--port", "0", "--unixsocket", self.path, "--dir", str(self._directory)),
                *("--save", "", "--appendonly", "yes", "--appendfsync", "always", "--auto-aof-rewrite-percentage", "0"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={
                **os.environ,
                "LD_PRELOAD": str(self._library),
                "VIRTUAL_CLOCK": str(self._directory / "clock"),
            },
        )
        while not self._answers():
            assert self._server.poll() is None, "the server did not start"
            time.sleep(0.005)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as asking, suppress(OSError):
            asking.connect(self.path)
            asking.sendall(_PING)
            return asking.recv(64) == b"+PONG\r\n"
        return False

    def _kill(self) -> None:
        self._server.kill()  # its timers stand, and so does an orderly end
        self._server.wait()


def clock_library(directory: Path) -> Path:
    """Build the library that gives a server its clocks, in this directory."""
    library = directory / "clock.so"
    source = Path(__file__).with_name("clock.c")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


class _Never(selectors.BaseSelector):
    """Waits for no file: an idle loop jumps to its next timer."""

    def __init__(self) -> None:
        self.loop: VirtualLoop | None = None
        self._known: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        number = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        key = self._known[fileobj] = selectors.SelectorKey(fileobj, number, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._known.pop(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self.register(fileobj, events, data)

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        return self._known[fileobj]

    def get_map(self) -> Any:
        return self._known

    def select(self, timeout: float | None = None) -> list[Any]:
        assert self.loop
        if timeout is None:
            raise RuntimeError("nothing will ever happen: no timer is left")
        self.loop.now += max(0.0, timeout)
        return []


_numbers = count()


def by_number(self: Any) -> int:
    """A hash by which something has the same place of a set in each play, wherever its memory is."""
    try:
        return self.hashed_number
    except AttributeError:
        self.hashed_number = next(_numbers)
        return self.hashed_number


class _Future(asyncio.Future[Any]):
    __hash__ = by_number


class _Task(asyncio.Task[Any]):
    __hash__ = by_number


class _Call:
    """A callback, which waits while its process is stopped."""

    __slots__ = ("_callback", "_loop", "handle")

    def __init__(self, loop: VirtualLoop, callback: Callable[..., object]) -> None:
        self._loop, self._callback = loop, callback
        self.handle: asyncio.Handle | None = None

    def __call__(self, *args: Any) -> None:
        assert self.handle
        if self.handle.cancelled():
            return
        if waiting := self._loop.stopped.get(PROCESS.get()):
            waiting.append((self, args, copy_context()))
        else:
            self._callback(*args)


class _Stopped(list[tuple[_Call, tuple[Any, ...], Context]]):
    """The calls of a stopped process that wait, in their order."""

    def __bool__(self) -> bool:
        return True


class VirtualLoop(asyncio.SelectorEventLoop):
    """Virtual time, begins at 0. The seed decides each message's latency."""

    def __init__(self, seed: int, server: VirtualServer) -> None:
        selector = _Never()
        self.now = 0.0
        super().__init__(selector)
        selector.loop = self
        self.chance = random.Random(seed)
        self.server = server
        self.wires: dict[Wire, None] = {}
        """Those that are open at the server, oldest first."""
        self._by_file: dict[int, Wire] = {}
        self._readable = select.epoll()
        self.trace = sha1(usedforsecurity=False)
        """Of every message, its connection and its time. Sizes depend on the ids that the server gives."""
        self.messages = 0
        self.round_trip_s = 0.0
        """Each command arrives this much later."""
        self.refusing = False
        """New connections are reset."""
        self.dead: set[str] = set()
        """Processes that were killed."""
        self.stopped: dict[str, _Stopped] = {}
        self.ahead_s: dict[str, float] = {}
        """By process, how far its wall clock is ahead."""
        self.network = copy_context()
        """The context of what no process does."""
        self.network.run(PROCESS.set, "network")
        self.tasks: dict[str, set[asyncio.Task[Any]]] = {}
        self.serve: Callable[[asyncio.Protocol], asyncio.Transport] | None = None
        """Makes the transport of a connection to the provider."""
        self._control = self.connected()
        factory: Any = self._make_task
        self.set_task_factory(factory)

    def time(self) -> float:
        return self.now

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:
        call = _Call(self, callback)
        call.handle = super().call_soon(call, *args, context=context)
        return call.handle

    def call_at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> asyncio.TimerHandle:
        call = _Call(self, callback)
        call.handle = handle = super().call_at(when, call, *args, context=context)
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(loop=self)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Here and now: no thread runs beside a play."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as e:
            done.set_exception(e)
        return done

    def latency(self) -> float:
        return self.chance.uniform(0.0001, 0.004)

    def note(self, what: str) -> None:
        """Add to the trace."""
        self.messages += 1
        self.trace.update(f"{self.now:.6f} {what}\n".encode())

    def tell_time(self) -> None:
        """Set the server's clock."""
        self.server.clock[:] = int((BASE_S + self.now) * 1_000_000).to_bytes(8, "little")

    def control(self, *commands: bytes) -> bytes:
        """Send these commands at once, and return their replies, which must be short lines."""
        self.tell_time()
        self._control.sendall(b"".join(commands))
        replies = b""
        while replies.count(b"\r\n") < len(commands):
            replies += self._control.recv(1 << 16)
        return replies

    def collect(self, *begun: Wire) -> None:
        """Take in every reply that the server writes, and pass it on. ``begun``: those that have some of theirs."""
        received = {wire.order: wire for wire in begun}
        more = True
        while more:
            more = False
            for file, _ in self._readable.poll(0):
                wire = self._by_file[file]
                received[wire.order] = wire
                try:
                    more = wire.receive() > _WRITE_BYTES or more
                except OSError:
                    wire.cut()
            if more:
                self.control(_PING)
        for _, wire in sorted(received.items()):
            wire.pass_on()

    def join(self, wire: Wire) -> None:
        """Collect what the server sends to it."""
        self.wires[wire] = None
        self._by_file[wire.socket.fileno()] = wire
        self._readable.register(wire.socket, select.EPOLLIN)

    def leave(self, wire: Wire) -> None:
        """Close it at the server."""
        if wire in self.wires:
            del self.wires[wire]
            self._readable.unregister(wire.socket)
            del self._by_file[wire.socket.fileno()]
            wire.socket.close()
            self.control(_PING)  # the server forgets it, and what it waits for, at the end of a turn

    def connected(self) -> socket.socket:
        """A connection to the server."""
        made = socket.socket(socket.AF_UNIX)
        made.connect(self.server.path)
        return made

    def restart_server(self, written: int) -> None:
        """Restart it as `VirtualServer.restart` does, which cuts all connections."""
        for wire in [*self.wires]:
            wire.cut()
        self._control.close()
        self.server.restart(written)
        self._control = self.connected()

    def stop_process(self, process: str, seconds: float) -> None:
        """Stop this process for so long."""
        if process not in self.stopped:
            self.stopped[process] = _Stopped()
            self.call_later(seconds, self._go_on, process, context=self.network)

    def _go_on(self, process: str) -> None:
        for call, args, context in self.stopped.pop(process, ()):
            self.call_soon(call, *args, context=context)

    def kill(self, process: str) -> None:
        """Let nothing of this process reach anything any more, but what is on its way."""
        self.dead.add(process)
        self.stopped.pop(process, None)
        for wire in [*self.wires]:
            if wire.process == process:
                wire.close()
        for task in [*self.tasks.get(process, ())]:
            task.cancel()

    def close(self) -> None:
        self._control.close()
        for wire in self.wires:
            wire.socket.close()
        super().close()

    async def create_connection(self, protocol_factory: Any, *args: Any, **options: Any) -> Any:
        if isinstance(sock := options.get("sock"), socket.socket):
            assert self.serve
            sock.close()
            protocol = protocol_factory()
            return self.serve(protocol), protocol
        await asyncio.sleep(self.latency())
        if self.refusing or PROCESS.get() in self.dead:
            raise ConnectionRefusedError("simulated")
        protocol = protocol_factory()
        wire = Wire(self, protocol)
        protocol.connection_made(wire)
        return wire, protocol

    def _make_task(self, loop: Any, coro: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:
        task = _Task(coro, loop=loop, **options)
        of_process = self.tasks.setdefault(PROCESS.get(), set())
        of_process.add(task)
        task.add_done_callback(of_process.discard)
        return task


class Wire(asyncio.Transport):
    """One connection to the server. What its client has written arrives, also if the client has closed it since."""

    def __init__(self, loop: VirtualLoop, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self.process = PROCESS.get()
        self._context = copy_context()
        self.number = loop.messages
        self.up_at = self.down_at = 0.0
        """Nothing in this direction arrives before."""
        self.silent = False
        """Half open: what is sent is lost."""
        self.error_instead = b""
        """Answers the next command, if it is not empty."""
        self.done = False
        """Whether that command is executed first."""
        self._loop, self._protocol = loop, protocol
        self._last_up = False
        self._received = b""
        self._on_way = 0
        self._closed = False
        self._blocked = 0
        """How many of its commands were blocking ones, or answered."""
        self._waits = False
        """It may be blocked at the server."""
        self.socket = loop.connected()
        self.socket.sendall(command("CLIENT", "ID"))
        self._id = int(self.socket.recv(64)[1:-2])
        self.order = next(_numbers)
        loop.join(self)

    @property
    def is_open(self) -> bool:
        """Whether its client uses it."""
        return not self._closed

    def write(self, data: Any) -> None:
        if self._closed:
            return
        late = 0.0 if self._last_up else self._loop.round_trip_s
        self._last_up = True
        self.up_at = max(self.up_at, self._loop.now) + self._loop.latency() + late
        self._on_way += 1
        self._loop.call_at(self.up_at, self._arrive, bytes(data), context=self._loop.network)

    def _arrive(self, data: bytes) -> None:
        self._on_way -= 1
        if self not in self._loop.wires:
            return
        self._loop.note(f"{self.number} >")
        if self.error_instead and not self.done:
            self._reply(b"-%b\r\n" % self.error_instead)
            self.error_instead = b""
        elif not self.silent:
            self._send(data)
        self._end_if_done()

    def _send(self, data: bytes) -> None:
        loop = self._loop
        if (blocks := _BLOCK.search(data)) and int(blocks[1]):
            data = data[: blocks.start()] + b"\r\nBLOCK\r\n$1\r\n0\r\n" + data[blocks.end() :]
            self._blocked += 1
            loop.call_later(int(blocks[1]) / 1000, self._unblock, self._blocked, context=loop.network)
        loop.tell_time()
        durable = b"\r\nWAITAOF\r\n" in data
        try:
            if blocks or durable or self._waits:
                self._waits = self._waits or bool(blocks)
                self.socket.sendall(data)
                for _ in range(2 + 2 * durable + len(data) // _TURN_BYTES):
                    loop.control(_PING)
                loop.collect()
            else:
                self.socket.sendall(data + _ECHO)
                while not self._received.endswith(_ECHOED):
                    self.receive()
                self._received = self._received.removesuffix(_ECHOED)
                loop.control(_PING)  # replies to others that UNBLOCK and PUBLISH cause are written after their own
                loop.collect(self)
        except OSError:
            self.cut()
        if durable:
            loop.server.kept = loop.server.written

    def _unblock(self, number: int) -> None:
        if number == self._blocked and self in self._loop.wires:
            self._loop.control(command("CLIENT", "UNBLOCK", self._id, "TIMEOUT"))
            self._loop.control(_PING)  # the server wrote the reply of the unblocked one after that of this command
            self._loop.collect()

    def receive(self) -> int:
        """Take in what the server has sent. Returns the number of bytes."""
        if not (data := self.socket.recv(1 << 22)):
            raise ConnectionResetError("the server closed a connection")
        self._received += data
        return len(data)

    def pass_on(self) -> None:
        """Send on what was received, as one piece: in how many the server wrote it is no part of a play."""
        data, self._received = self._received, b""
        if not data:
            return
        self._blocked += 1
        self._waits = False
        if self.error_instead:
            data, self.error_instead = b"-%b\r\n" % self.error_instead, b""
        if not self.silent:
            self._reply(data)

    def _reply(self, data: bytes) -> None:
        self.down_at = max(self.down_at, self._loop.now) + self._loop.latency()
        self._loop.call_at(self.down_at, self._deliver, data, context=self._context)

    def _deliver(self, data: bytes) -> None:
        self._last_up = False
        if not self._closed:
            self._loop.note(f"{self.number} <")
            self._protocol.data_received(data)

    def cut(self) -> None:
        """Reset the connection: what is on its way to the server is lost, too."""
        self._loop.leave(self)
        self._close(ConnectionResetError("simulated"))

    def lose_replies(self) -> None:
        """Reset the connection for its client alone: what is on its way to the server arrives."""
        self._close(ConnectionResetError("simulated"))

    def close(self) -> None:
        self._close(None)

    abort = close

    def _close(self, error: Exception | None) -> None:
        if not self._closed:
            self._closed = True
            self._loop.call_soon(self._protocol.connection_lost, error, context=self._context)
            self._end_if_done()

    def _end_if_done(self) -> None:
        if self._closed and not self._on_way:
            self._loop.leave(self)

    def is_closing(self) -> bool:
        return self._closed

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def is_reading(self) -> bool:
        return True
