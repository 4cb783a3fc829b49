"""Runs a pytest session in processes that are forked after its collection: everything is imported and collected once.

Files whose tests wait and files whose tests compute have a queue each, the longest first. A worker takes the next file
of its queue whenever it has ended one, and sends its reports through a pipe. As a plugin of `tests.run`, which says by
TESTS_POOL what to run at once: ``-p tests.pool``.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from tests.fork_server import APART, ticks_of

_HZ = os.sysconf("SC_CLK_TCK")
DEFAULT_WEIGHT = 4
"""Of a file that was never measured."""
_NUMBER = 2
"""Bytes of a file's number in a queue."""


class Settings(msgspec.Struct):
    results: str
    """Where `Results` are written at its end."""
    waiting: int
    """Workers for files whose tests wait."""
    computing: int
    """Workers for those whose tests compute; these yield to the others."""
    tokens: tuple[int, int]
    """A pipe that all sessions share. A worker whose tests wait takes as many bytes as its file weighs, and puts them
    back after it: so files that mostly wait run beside many others, and files that compute beside few.
    """
    turn: tuple[int, int]
    """A pipe with one byte. Who has it takes tokens, so that no two wait for what the other has."""
    weights: dict[str, int]
    """Tokens of each file."""
    compute: tuple[str, ...]
    """The rooms whose tests compute."""
    seconds: dict[str, float]
    """What each file takes. Those that are not there go first: last, a long one would run alone."""


class Cost(msgspec.Struct, array_like=True):
    """What a file took, with all processes that it started."""

    seconds: float
    cpu: float


class Results(msgspec.Struct):
    """What a session found."""

    files: dict[str, Cost] = {}
    took: dict[str, float] = {}
    """Seconds of each test."""
    ended: dict[str, str] = {}
    """Outcome of each test."""


class _File(NamedTuple):
    name: str
    items: Sequence[pytest.Item]


@dataclass
class _Worker:
    """A forked process as its parent sees it."""

    pid: int
    reports: int
    queue: int
    takes_tokens: bool
    holds_tokens: int = 0
    at: str = ""
    """The file at work."""
    open: list[pytest.Item] = field(default_factory=list[pytest.Item])
    """Tests of files that it has taken, and whose end it has not reported."""
    died: str = ""
    """The traceback that ended it."""
    unread: bytes = b""


def cpu_seconds() -> float:
    """Of this process and its fork servers, and of all that they ever started and that did not leave them."""
    ticks, pids = sum(APART.values()), [os.getpid(), *(pid for pid, ended in APART.items() if not ended)]
    while pids:
        at = Path("/proc", str(pids.pop()))
        with suppress(OSError):
            ticks += ticks_of(at)
            for children in at.glob("task/*/children"):
                pids += map(int, children.read_text().split())
    return ticks / _HZ or sum(os.times()[:4])


class Pool:
    """The plugin, in the parent."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._results = Results()
        self._workers: list[_Worker] = []
        self._files: list[_File] = []
        self._parent = os.getpid()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Run all files, each in the next free worker."""
        if session.testsfailed or session.config.option.collectonly:
            return None
        self._session = session
        by_file: dict[str, list[pytest.Item]] = {}
        for item in session.items:
            by_file.setdefault(item.nodeid.split("::")[0], []).append(item)
        longest = sorted(by_file, key=lambda name: -self._settings.seconds.get(name, inf))
        self._files = [_File(name, by_file[name]) for name in longest]
        computing = [n for n, name in enumerate(longest) if name.startswith(self._settings.compute)]
        waiting = [n for n, name in enumerate(longest) if not name.startswith(self._settings.compute)]
        assert threading.active_count() == 1, f"a fork would lose threads: {threading.enumerate()}"
        gc.collect()
        gc.freeze()  # what the workers share stays shared, and costs their collections nothing
        queues = {_queue(waiting): (True, min(self._settings.waiting, len(waiting)))}
        queues[_queue(computing)] = (False, min(self._settings.computing, len(computing)))
        try:
            for queue, (takes_tokens, count) in queues.items():
                for _ in range(count):
                    self._fork(queue, takes_tokens=takes_tokens)
            self._follow()
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
        finally:
            for worker in self._workers:  # after an interrupt
                os.kill(worker.pid, signal.SIGKILL)
                os.waitpid(worker.pid, 0)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what a test took and how it ended."""
        took, ended = self._results.took, self._results.ended
        took[report.nodeid] = took.get(report.nodeid, 0.0) + report.duration
        if report.failed or (report.when == "call" and report.nodeid not in ended) or report.skipped:
            ended[report.nodeid] = report.outcome

    def pytest_sessionfinish(self) -> None:
        """Write the results."""
        if os.getpid() == self._parent:
            Path(self._settings.results).write_bytes(msgspec.json.encode(self._results))

    def _fork(self, queue: int, *, takes_tokens: bool) -> None:
        reports, to_parent = os.pipe()
        if pid := os.fork():
            os.close(to_parent)
            self._workers.append(_Worker(pid, reports, queue, takes_tokens))
            return
        code = 1
        try:
            for descriptor in (reports, *(worker.reports for worker in self._workers)):
                os.close(descriptor)
            self._workers.clear()
            settings = self._settings if takes_tokens else None
            code = _Work(self._session, self._files, queue, to_parent, settings).run()
        except BaseException:
            with suppress(OSError):
                _send(to_parent, {"died": traceback.format_exc()})
        finally:
            os._exit(code)

    def _follow(self) -> None:
        """Pass on what the workers report, until all have ended or the session is to stop."""
        with selectors.DefaultSelector() as selector:
            while self._workers and not self._session.shouldfail and not self._session.shouldstop:
                for worker in self._workers:
                    if worker.reports not in selector.get_map():
                        selector.register(worker.reports, selectors.EVENT_READ, worker)
                for key, _ in selector.select():
                    if data := os.read(key.fd, 2**16):
                        *lines, key.data.unread = (key.data.unread + data).split(b"\n")
                        for line in lines:
                            self._received(key.data, json.loads(line))
                    else:
                        selector.unregister(key.fd)
                        os.close(key.fd)
                        self._ended(key.data)

    def _received(self, worker: _Worker, message: dict[str, Any]) -> None:
        config = self._session.config
        match message:
            case {"takes": number}:
                worker.open += self._files[number].items
            case {"begins": number}:
                worker.at = self._files[number].name
                worker.holds_tokens = self._settings.weights.get(worker.at, DEFAULT_WEIGHT) * worker.takes_tokens
            case {"report": data}:
                if isinstance(data["longrepr"], list):  # where and why it was skipped
                    data["longrepr"] = tuple(data["longrepr"])
                report = config.hook.pytest_report_from_serializable(config=config, data=data)
                config.hook.pytest_runtest_logreport(report=report)
                if report.when == "teardown":
                    worker.open = [item for item in worker.open if item.nodeid != report.nodeid]
            case {"ends": number, "seconds": seconds, "cpu": cpu}:
                worker.holds_tokens = 0
                self._results.files[self._files[number].name] = Cost(seconds, cpu)
            case other:
                worker.died = other["died"]

    def _ended(self, worker: _Worker) -> None:
        code = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        self._workers.remove(worker)
        if code == 0:
            return
        os.write(self._settings.tokens[1], b"." * worker.holds_tokens)
        self._fail(worker.at, f"a worker ended with {code} while, or after, it ran this file:\n{worker.died}")
        for item in worker.open:
            self._fail(item.nodeid, f"not run to its end: its worker ended with {code}")
        if worker.at:
            self._fork(worker.queue, takes_tokens=worker.takes_tokens)

    def _fail(self, nodeid: str, why: str) -> None:
        report = pytest.TestReport(nodeid, (nodeid, None, nodeid), {}, "failed", why, "teardown")
        self._session.config.hook.pytest_runtest_logreport(report=report)


class _Work:
    def __init__(
        self, session: pytest.Session, files: Sequence[_File], queue: int, reports: int, settings: Settings | None
    ) -> None:
        """``settings``: for the tokens; None: it takes none."""
        self._session = session
        self._files = files
        self._queue = queue
        self._reports = reports
        self._settings = settings

    def run(self) -> int:
        """Run files until none is left. The exit code."""
        config = self._session.config
        capture: Any = config.pluginmanager.get_plugin("capturemanager")
        capture.stop_global_capturing()  # its files are the parent's
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the parent prints
        capture.start_global_capturing()
        capture.suspend_global_capture()
        config.pluginmanager.register(self)
        if self._settings is None:
            os.nice(5)
        files = self._taken()
        number = next(files, None)
        while number is not None:
            weight = self._take_tokens(self._files[number].name)
            _send(self._reports, {"begins": number})
            began, cpu = time.monotonic(), cpu_seconds()
            items = self._files[number].items
            for item, following in pairwise(items):
                self._protocol(item, following)
            after = next(files, None)  # known before the last test, whose teardown keeps what the next file needs
            self._protocol(items[-1], None if after is None else self._files[after].items[0])
            if self._settings:
                os.write(self._settings.tokens[1], b"." * weight)
            took = {"seconds": time.monotonic() - began, "cpu": cpu_seconds() - cpu}
            _send(self._reports, {"ends": number, **took})
            number = after
        config.hook.pytest_sessionfinish(session=self._session, exitstatus=0)
        config._ensure_unconfigure()  # pyright: ignore[reportPrivateUsage]  # raises what nobody has caught
        return 0

    def _take_tokens(self, file: str) -> int:
        if self._settings is None:
            return 0
        weight = self._settings.weights.get(file, DEFAULT_WEIGHT)
        os.read(self._settings.turn[0], 1)
        missing = weight
        while missing:
            missing -= len(os.read(self._settings.tokens[0], missing))
        os.write(self._settings.turn[1], b".")
        return weight

    def _protocol(self, item: pytest.Item, following: pytest.Item | None) -> None:
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)

    def _taken(self) -> Iterator[int]:
        while number := os.read(self._queue, _NUMBER):
            _send(self._reports, {"takes": int.from_bytes(number, "big")})
            yield int.from_bytes(number, "big")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send it to the parent."""
        config = self._session.config
        data = config.hook.pytest_report_to_serializable(config=config, report=report)
        _send(self._reports, {"report": data})


def _queue(numbers: Sequence[int]) -> int:
    """A pipe that has these numbers, and then ends. All of them fit: nobody reads yet."""
    queue, filled = os.pipe()
    for number in numbers:
        os.write(filled, number.to_bytes(_NUMBER, "big"))
    os.close(filled)
    return queue


def _send(descriptor: int, message: dict[str, Any]) -> None:
    data = memoryview(json.dumps(message).encode() + b"\n")
    while data:
        data = data[os.write(descriptor, data) :]


def pytest_configure(config: pytest.Config) -> None:
    """Take part if `tests.run` says so."""
    if settings := os.environ.pop("TESTS_POOL", ""):
        config.pluginmanager.register(Pool(msgspec.json.decode(settings, type=Settings)))
