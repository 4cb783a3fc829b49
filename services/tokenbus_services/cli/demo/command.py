"""`tokenbus demo`: runs the whole bus on this machine for one request, then removes every trace."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from tokenbus import Client
from tokenbus_services.cli import exit_codes as ending
from tokenbus_services.cli.demo.demo_output import DemoWatcher, demo_watcher
from tokenbus_services.cli.demo.plan import KEY_VARIABLES, DemoPlan, environment, plan_for, request_of, settings_text
from tokenbus_services.cli.render.output import showing
from tokenbus_services.cli.runs.follow import show_run
from tokenbus_services.cli.service_registry import services_of
from tokenbus_services.cli.signals import stop_on_signal
from tokenbus_services.cli.up.child import Child, ChildGone, ChildrenSlow
from tokenbus_services.cli.up.supervisor import Supervisor, WorkerSlot
from tokenbus_services.process.embedded_server import EmbeddedServer, free_port
from tokenbus_services.settings import Settings, StageSettings

START_S = 60.0
STOP_GRACE_S = StageSettings().drain_s + 10.0
SERVER, PROVIDER = "server", "provider"
SERVICES = services_of(Settings())


def run(*, provider: str | None, model: str | None, keep: bool) -> int:
    """Run the demo; return the exit code: 0 if the run completed.

    Raises SettingsError, ServerError, RunError; ChildGone and ChildrenSlow for a child that ended or is slow.
    """
    plan = plan_for(provider, model, os.environ)
    directory = Path(tempfile.mkdtemp(prefix="tokenbus-demo-"))
    names = [SERVER, *([PROVIDER] if plan.replayed else []), *SERVICES]
    try:
        with demo_watcher(directory, names) as watcher:
            return asyncio.run(_until_signal(plan, directory, watcher))
    finally:
        if keep:
            print(f"[kept] {directory}", flush=True)
        else:
            shutil.rmtree(directory, ignore_errors=True)


async def _until_signal(plan: DemoPlan, directory: Path, watcher: DemoWatcher) -> int:
    stop = stop_on_signal()
    demo = asyncio.create_task(_demo(plan, directory, watcher))
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({demo, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not demo.done():
        demo.cancel()
        await asyncio.wait({demo})
        return ending.INTERRUPTED
    return demo.result()


async def _demo(plan: DemoPlan, directory: Path, watcher: DemoWatcher) -> int:
    async with _server(directory, watcher) as url, _provider(plan, watcher) as base_url:
        config = directory / "tokenbus.toml"
        config.write_text(
            settings_text(plan, redis_url=url, base_url=base_url, directory=directory, blobs_port=free_port()),
            encoding="utf-8",
        )
        supervisor = Supervisor(
            [
                WorkerSlot(
                    name=service,
                    service=service,
                    withheld=frozenset() if service == "fetcher" else KEY_VARIABLES,
                )
                for service in SERVICES
            ],
            env=environment(os.environ, config),
            watcher=watcher,
            grace_s=STOP_GRACE_S,
            restart=False,
        )
        stop = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as group:  # if a service ends, the demo ends, and vice versa
                group.create_task(supervisor.run(stop))
                await supervisor.all_ready(timeout_s=START_S)
                watcher.on_request(request_of(plan))
                status = await _one_run(plan, url)
                stop.set()
        except BaseExceptionGroup as e:
            raise e.exceptions[0] from None
        return status


async def _one_run(plan: DemoPlan, url: str) -> int:
    async with Client(url) as bus:
        run = await bus.publish(request_of(plan))
        with showing() as show:
            status = await show_run(bus, run.id, show, wait_s=START_S)
        if status:
            await run.result()  # raises the run's error
        return status


@asynccontextmanager
async def _server(directory: Path, watcher: DemoWatcher) -> AsyncGenerator[str]:
    server = EmbeddedServer(directory / SERVER)
    starting = asyncio.create_task(asyncio.to_thread(server.start))
    try:
        await asyncio.shield(starting)
        watcher.ready(SERVER, server.url)
        yield server.url
    finally:
        await asyncio.wait({starting})  # a start continues in its thread, even if this call is cancelled
        await asyncio.to_thread(server.stop)


@asynccontextmanager
async def _provider(plan: DemoPlan, watcher: DemoWatcher) -> AsyncGenerator[str | None]:
    """The base URL of the mock provider, or the plan's URL of the real one."""
    if not plan.replayed:
        yield plan.base_url
        return
    first_line: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def on_line(line: str) -> None:
        if first_line.done():
            watcher.on_line(PROVIDER, line)
        else:
            first_line.set_result(line)  # its first line is its URL

    env = {name: value for name, value in os.environ.items() if name not in KEY_VARIABLES}
    child = await Child.start([sys.executable, "-P", "-m", "tokenbus_services.mock_provider"], env, on_line)
    try:
        ended = asyncio.create_task(child.ended())
        await asyncio.wait({first_line, ended}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            raise ChildGone(PROVIDER, ended.result(), first_line.result() if first_line.done() else "")
        if not first_line.done():
            raise ChildrenSlow([PROVIDER], START_S)
        watcher.ready(PROVIDER, first_line.result())
        yield first_line.result()
    finally:
        await child.stop(STOP_GRACE_S)
