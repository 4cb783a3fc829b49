"""The fixtures that all tests share: one real server, and for each test keys of its own that must not leak."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from uuid import uuid4

import pytest
import structlog
from hypothesis import HealthCheck, settings

from tests.awaited import all_paths
from tests.leaks import check_keys, check_tasks
from tests.servers import shared_server
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server

# A loaded machine is slow; that says nothing of the code under test.
settings.register_profile("tokenbus", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("tokenbus")

# structlog's own way to show an exception, by rich, costs tenths of a second for each.
_plain = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
structlog.configure(processors=[*structlog.get_config()["processors"][:-1], _plain])

# A shell that starts tests in the background lets them ignore Ctrl-C, and so would all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Each HTTP client, here and in each worker, loads the authorities that it trusts: 30 ms for those of the machine. No
# test calls a public server.
os.environ["SSL_CERT_FILE"] = str(Path(__file__).with_name("authority.pem"))

_outcome = pytest.StashKey[pytest.TestReport]()


@pytest.fixture(scope="session")
def server_url() -> Generator[str]:
    """The url of the server under test, one process for the whole session."""
    with shared_server() as url:
        yield url


@pytest.fixture
async def server(server_url: str) -> AsyncGenerator[Server]:
    """A connection of the test's own."""
    async with Server(server_url) as server:
        yield server


@pytest.fixture
async def keys(server: Server, request: pytest.FixtureRequest) -> AsyncGenerator[Keys]:
    """Key names with a prefix of the test's own. After a test that passed: no key that nothing bounds, no entry pending
    (but for the marker `leaves_pending`) and no task still running."""
    before = asyncio.all_tasks()
    keys = Keys(prefix=f"t{uuid4().hex[:12]}", partitions=4)
    yield keys
    try:
        report = request.node.stash.get(_outcome, None)
        if report and report.passed:
            await eventually(lambda: check_tasks(before), timeout=20)
            await check_keys(server, keys, may_leave_pending=bool(request.node.get_closest_marker("leaves_pending")))
    finally:
        async for key in server.client.scan_iter(match=f"{keys.prefix}:*", count=1000):
            await server.client.unlink(key)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.excinfo and str(call.excinfo.value).startswith("Timeout (>"):  # pytest-timeout's, which names threads
        report.sections.append(("Where each task waited", all_paths()))
    if report.when == "call":
        item.stash[_outcome] = report
    return report


class _NamesFailures:
    """Prints the name of a failed test at once, so that it is known even if the run is cut off later."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._terminal.write_line(f" {report.nodeid} failed in its {report.when} after {report.duration:.1f} s")


@pytest.hookimpl(trylast=True)  # the terminal reporter is made in this hook too
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test of clients may have to install their packages first."""
    for item in items:
        if {"clients", "more_clients"} & {*item.path.parts} and not item.get_closest_marker("timeout"):
            from tests.clients.node import INSTALL_S

            item.add_marker(pytest.mark.timeout(INSTALL_S + 300))


def pytest_configure(config: pytest.Config) -> None:
    terminal: pytest.TerminalReporter | None = config.pluginmanager.get_plugin("terminalreporter")
    if terminal and not hasattr(config, "workerinput"):  # pytest-xdist reports where the workers were started
        config.pluginmanager.register(_NamesFailures(terminal))
