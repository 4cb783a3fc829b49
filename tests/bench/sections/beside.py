"""The added wait of a small run beside hostile answers and large runs: alone and beside them in turn, in one bench.

The providers, the bench and the services share the machine, so a part of the wait is the machine's. Separate processes
create large and hostile answers, because creating 8 MB blocks the mock provider for a second.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import msgspec

from tests.bench.figures import Figure
from tests.bench.procs import Processes, listens
from tests.bench.stack import PROVIDER, Stack, running
from tests.chaos import hostile
from tokenbus_services.mock_provider import Reply, Script, Turn
from tokenbus_services.process.embedded_server import free_port

PROBES = 40
"""Number of small runs, one after the other, alone and beside each other load."""
ROUNDS = 3
LARGE, HOSTILE = 2, 4
"""Number of runs open at any time."""
MOST_MORE_MS = 100.0
END_S = 120.0
_LARGE_TEXT = ("0123456789" * 200 + " ") * 4_000
"""8 MB."""
_SCRIPTS = {"small": Script(turns=(Turn(says=Reply(text="a word or two")),))}
_LARGE = Script(turns=(Turn(says=Reply(text=_LARGE_TEXT)),))
_TERMINAL = {"completed", "incomplete", "failed", "cancelled"}
_LIMITS = "block_characters = 16777216\n"
"""Of the table that the stack's settings end with."""
_PATIENCE = "connect_timeout_s = 2.0\nfirst_event_timeout_s = 4.0\nidle_timeout_s = 2.0"


def beside() -> list[Figure]:
    """Measure small runs alone, beside large runs, and beside each attack of the hostile provider."""
    port, large_port = free_port(), free_port()
    large = f'[providers.large]\napi = "anthropic"\nbase_url = "http://127.0.0.1:{large_port}"\napi_key_env = ""\n'
    tables = "".join(
        f'[providers.{name}]\napi = "{api}"\nbase_url = "http://127.0.0.1:{port}"\napi_key_env = ""\n{_PATIENCE}\n'
        for api, name in hostile.NAMES.items()
    )
    with ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory(prefix="tokenbus-bench-")))
        processes = stack.enter_context(Processes(directory))
        (directory / "scripts").mkdir()
        (directory / "scripts" / "large.json").write_bytes(msgspec.json.encode(_LARGE))
        arguments = ("--scripts", str(directory / "scripts"), "--port", str(large_port))
        processes.start("large provider", "tokenbus_services.mock_provider", *arguments)
        processes.until(lambda: listens(large_port), "the provider of large runs")
        processes.start("hostile provider", "tests.bench.hostile_server", str(port))
        processes.until(lambda: listens(port), "the hostile provider")
        services = stack.enter_context(
            running([], scripts=_SCRIPTS, settings=f"{_LIMITS}[retry]\nmax_attempts = 1\n{large}{tables}")
        )
        companies = {
            f"{LARGE} runs of {len(_LARGE_TEXT) / 1e6:.0f} MB": Company(services, LARGE, _large()),
            f"{HOSTILE} hostile answers": Company(services, HOSTILE, _hostile(hostile.WAYS)),
        } | {
            f"{HOSTILE} answers with {what}": Company(services, HOSTILE, _hostile(ways))
            for what, ways in hostile.KINDS.items()
        }
        _probes(services, lambda: None)  # warm
        return [figure for what, company in companies.items() for figure in _compared(services, what, company)]


class Company:
    """Keeps this many runs open until `end`."""

    def __init__(self, stack: Stack, count: int, requests: Iterator[dict[str, object]]) -> None:
        self._stack = stack
        self._count = count
        self._requests = requests
        self._open: set[str] = set()

    def keep(self) -> None:
        """Start runs in place of those that have ended."""
        self._open = {run for run in self._open if not self._has_ended(run)}
        while len(self._open) < self._count:
            self._open.add(_publish(self._stack, next(self._requests)))

    def end(self) -> None:
        """Cancel them, and wait for their end."""
        for run in self._open:
            _put(self._stack, {"type": "cancel", "run": run})
        deadline = time.monotonic() + END_S
        while not all(self._has_ended(run) for run in self._open):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(self._open)} runs have not ended within {END_S:g} s")
            time.sleep(0.02)
        self._open.clear()

    def _has_ended(self, run: str) -> bool:
        status: bytes | None = self._stack.client.hget(self._stack.keys.run(run), "status")
        return status is not None and status.decode() in _TERMINAL


def _compared(stack: Stack, what: str, company: Company) -> list[Figure]:
    alone: list[list[float]] = []
    with_them: list[list[float]] = []
    for _ in range(ROUNDS):
        alone.append(_probes(stack, lambda: None))
        company.keep()
        time.sleep(1.0)  # they have begun
        with_them.append(_probes(stack, company.keep))
        company.end()
    middle, bare = median(itertools.chain(*with_them)), median(itertools.chain(*alone))
    ratios = sorted(median(w) / median(a) for w, a in zip(with_them, alone, strict=True))
    more = median(max(w) - max(a) for w, a in zip(with_them, alone, strict=True))
    return [
        Figure(
            name=f"small run beside {what}, p50 (bare: alone)",
            unit="ms",
            value=middle,
            bare=bare,
            ratio=median(ratios),
            spread=(ratios[0], ratios[-1]),
            aim=f"≤ {MOST_MORE_MS:g} ms more",
            met=middle - bare <= MOST_MORE_MS,
        ),
        Figure(
            name=f"small run beside {what}, the slowest of {PROBES}: more than the slowest alone",
            unit="ms",
            value=more,
            aim=f"≤ {MOST_MORE_MS:g} ms",
            met=more <= MOST_MORE_MS,
        ),
    ]


def _probes(stack: Stack, before_each: Callable[[], None]) -> list[float]:
    """Milliseconds of each small run, from its request to its end."""
    times: list[float] = []
    for _ in range(PROBES):
        before_each()
        began = time.monotonic()
        run = _publish(stack, {"provider": PROVIDER, "model": "small"})
        _until_ended(stack, run)
        times.append((time.monotonic() - began) * 1000)
    return times


def _until_ended(stack: Stack, run: str) -> None:
    """Read its log, as any subscriber does, up to the terminal event."""
    log, position = stack.keys.log(run), "0-0"
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        for _, entries in stack.client.xread({log: position}, block=1000) or ():
            for entry_id, fields in entries:
                position = entry_id
                event: dict[str, Any] = msgspec.json.decode(fields[b"__data__"])
                if event["type"] in _TERMINAL:
                    if event["type"] != "completed":
                        raise RuntimeError(f"a small run ended {event}")
                    return
    raise TimeoutError(f"a small run has not ended within {END_S:g} s")


def _large() -> Iterator[dict[str, object]]:
    while True:
        yield {"provider": "large", "model": "large"}


def _hostile(ways: Iterable[Callable[..., Any]]) -> Iterator[dict[str, object]]:
    for way in itertools.cycle(ways):
        for name in hostile.names_of(way):
            yield {"provider": name, "model": way.__name__, "on_failure": "fail"}


def _publish(stack: Stack, request: dict[str, object]) -> str:
    run = f"bench-{uuid4().hex}"
    messages = [{"role": "user", "content": f"Please look at {run}"}]
    _put(stack, {"type": "generate", "id": run, "messages": messages, **request})
    return run


def _put(stack: Stack, request: dict[str, object]) -> None:
    stack.client.xadd(stack.keys.requests, {"__data__": msgspec.json.encode(request)})
