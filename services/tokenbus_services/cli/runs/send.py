"""`tokenbus send` and `tokenbus follow`: publishes a request from a file or from options, and shows a run."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any, BinaryIO, Literal

import msgspec

from tokenbus import Client, TreeCursor
from tokenbus.bus.keys import SubscribedTopic
from tokenbus.errors import RequestInvalid, RunError, RunNotFound, SettingsError
from tokenbus.events.public import RunEnd, RunFailedEvent
from tokenbus.events.topics import type_of
from tokenbus_services import settings as configuration
from tokenbus_services.cli import connect as reaching
from tokenbus_services.cli import exit_codes as ending
from tokenbus_services.cli import mock
from tokenbus_services.cli.render.output import Show, fields_of, print_json, showing

Request = Mapping[str, object]
WAIT_S = 60
"""How long a run that is shown may wait to be accepted."""
ACCEPTED_S = 3.0
"""How long `send` waits for that, before it prints the id of a run that it does not show."""


async def send(
    file: BinaryIO | None,
    options: Mapping[str, str | int | None],
    *,
    tools: Sequence[str],
    follow: bool,
    as_json: bool,
) -> int:
    """Publish, print the run's id, and with ``follow`` show the run; return the exit code."""
    if file and (tools or any(value is not None for value in options.values())):
        raise SettingsError("options", "FILE", "holds the whole request: leave the options that make one")
    given = {name: value for name, value in options.items() if value is not None}
    if file:
        request = from_file(file.name, file.read())
    elif not given and not tools and reaching.has_mock_provider():
        request, follow = mock.demo_request(), True
    else:
        if reaching.has_mock_provider():
            given = mock.completed(given)
        elif not given.keys() & {"provider", "model"}:  # in the directory of no deployment, that is the first to say
            reaching.with_server(configuration.load())
        request = from_options(given, tools)
    async with reaching.client() as bus:
        run = await bus.publish(request)
        if not follow:
            await _accepted(bus, run.id)
            print(msgspec.json.encode({"run": run.id}).decode() if as_json else run.id)
            return 0
        if not as_json:
            print(run.id, file=sys.stderr, flush=True)
        try:
            with showing(as_json=as_json) as show:
                return await show_run(bus, run.id, show, wait_s=WAIT_S)
        except RunNotFound:
            print(_waits(WAIT_S), file=sys.stderr, flush=True)
            raise
        except asyncio.CancelledError:  # Ctrl-C
            print(f"the run continues, and costs: `tokenbus cancel {run.id}` stops it", file=sys.stderr, flush=True)
            raise


async def _accepted(bus: Client, run: str) -> None:
    """Return when the run has begun, or waits for a service. Raises the error of a run that failed without a start."""
    try:
        async with asyncio.timeout(ACCEPTED_S):
            async for event in bus.follow(run, wait_s=ACCEPTED_S):
                if isinstance(event, RunFailedEvent):
                    await bus.result(run)
                return
    except (RunNotFound, TimeoutError):
        print(_waits(ACCEPTED_S), file=sys.stderr, flush=True)


def _waits(seconds: float) -> str:
    return (
        f"the request waits on {reaching.server_name()}, where no service has accepted it for {seconds:g} s: "
        "start the services there (`tokenbus up`, `tokenbus worker …`); `tokenbus doctor` says what is missing"
    )


def from_file(name: str, data: bytes) -> Request:
    """Parse the request in a file. Raises RequestInvalid."""
    try:
        return msgspec.json.decode(data, type=dict[str, object])
    except msgspec.DecodeError as e:
        raise RequestInvalid(name, str(e)) from None


def from_options(options: Mapping[str, str | int | None], tools: Sequence[str] = ()) -> Request:
    """Build the request from options. Raises RequestInvalid if one is missing."""
    given = {name: value for name, value in options.items() if value is not None}
    for needed in ("provider", "model", "text"):
        if needed not in given:
            raise RequestInvalid(f"--{needed}", "missing; give it, or the whole request as a FILE (-: stdin)")
    text = given.pop("text")
    request: dict[str, Any] = {"type": "generate", **given, "messages": [{"role": "user", "content": text}]}
    if tools:
        request["tools"] = [{"name": name} for name in tools]
    return request


async def tail(
    topic: SubscribedTopic,
    *,
    group: str | None,
    begin: Literal["now", "start"],
    runs: Sequence[str],
    kinds: Sequence[str],
    as_json: bool,
) -> None:
    """Show events; with a group, only those that its other workers do not get. ``runs``, ``kinds``: only these, if any
    are named.
    """
    async with reaching.client() as bus:
        subscribe: Any = bus.subscribe  # its overloads are by literal topics
        try:
            subscription = subscribe(topic, group=group, from_=begin, runs=set(runs) or None, kinds=set(kinds) or None)
        except ValueError as e:
            where = "--kind" if str(e).startswith("kinds") else "--group"
            raise SettingsError("options", where, str(e)) from None
        async with subscription as events:
            with showing(as_json=as_json, many_runs=True) as show:
                async for event in events:
                    show(event)


async def follow(run: str, *, after: int, as_json: bool) -> int:
    """Show a run from a cursor to its end; return the exit code for its outcome."""
    async with reaching.client() as bus:
        with showing(as_json=as_json) as show:
            return await show_run(bus, run, show, after=after)


async def follow_tree(run: str, *, after: str | None, as_json: bool) -> int:
    """Show a run with the runs below it from a cursor to their end; return the exit code for the run's outcome."""
    try:
        cursor = None if after is None else TreeCursor.parse(after)
    except ValueError as e:
        raise SettingsError("options", "--after", str(e)) from None
    async with reaching.client() as bus:
        with showing(as_json=as_json, many_runs=True) as show:
            async with aclosing(bus.follow_tree(run, after=cursor, wait_s=10.0)) as steps:
                async for step in steps:
                    if as_json:
                        print_json({**fields_of(step.event), "path": step.path, "cursor": str(step.cursor)})
                    else:
                        show(step.event)
        try:
            await bus.result(run)
        except RunError as e:
            return ending.code_of(e)
        return 0


async def show_run(bus: Client, run: str, show: Show, *, after: int = -1, wait_s: float = 10.0) -> int:
    """Show a run's events after ``after``; return the exit code for its outcome."""
    async for event in bus.follow(run, after=after, wait_s=wait_s):
        show(event)
        if isinstance(event, RunEnd):
            return ending.RUN_STATUS[type_of(event)]
    try:  # the cursor is past the end
        await bus.result(run)
    except RunError as e:
        return ending.code_of(e)
    return 0
