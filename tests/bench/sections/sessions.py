"""What a session costs: a chunk, and from an append to the first chunk, beside a request of its own; the keys of a
hundred turns, beside those of as many runs; and sessions that do nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from statistics import median

from tests.bench.figures import Figure
from tests.bench.procs import cpu_s, resident_kb
from tests.bench.stack import PROVIDER, SERVICES, Stack, running
from tokenbus import Client, RunEnded
from tokenbus.client.publishing import new_run_id
from tokenbus.events.sessions import session_ref
from tokenbus_services.mock_provider import Reply, Script, Turn

MODEL, LONG = "weather", "long"
FIRSTS = 60
TURNS = 100
LONG_RUNS, WORDS = 12, 4000
IDLE, AT_ONCE = 10_000, 50
IDLE_S = 10.0
ASKED = "And what is it like a day later, in the afternoon?"
REQUEST = {"provider": PROVIDER, "model": MODEL}


def measured_sessions() -> list[Figure]:
    """On one stack, in turn."""
    turn = Turn(says=Reply(text="The sky is grey, and it stays dry until the evening. " * 3))
    answers = Script(turns=(turn,) * (FIRSTS + 1 + TURNS))
    words = Turn(says=Reply(text=" ".join(f"word{n % 10}" for n in range(WORDS))))
    with running([], scripts={MODEL: answers, LONG: Script(turns=(words,) * LONG_RUNS)}) as stack:
        return asyncio.run(_measured(stack))


async def _measured(stack: Stack) -> list[Figure]:
    port: int = stack.client.connection_pool.connection_kwargs["port"]
    async with Client(f"redis://127.0.0.1:{port}") as bus:
        return [
            await _chunk(bus, stack),
            *await _first_chunk(bus),
            *await _turns(bus, stack),
            *await _idle(bus, stack),
        ]


async def _chunk(bus: Client, stack: Stack) -> Figure:
    """Long answers in a session and of requests alone, in turn: the CPU of services and server. Each run of the session
    has one message and no history, so that only its chunks differ from the other's, if at all.
    """

    def spent() -> float:
        return sum(cpu_s(stack.pids[name]) for name in (*SERVICES, "server"))

    ratios, costs = list[float](), ([list[float](), list[float]()])
    for n in range(LONG_RUNS):
        session = bus.session(f"long-{n}")
        await session.configure({**REQUEST, "model": LONG})
        before = spent()
        receipt = await session.send(ASKED)
        assert receipt.fate.run
        await bus.result(receipt.fate.run)
        between = spent()
        run = await bus.publish({**REQUEST, "model": LONG, "messages": [{"role": "user", "content": ASKED}]})
        await run.result()
        after = spent()
        for cost, each in zip(costs, (between - before, after - between), strict=True):
            cost.append(each / WORDS * 1e6)
        ratios.append(costs[0][-1] / costs[1][-1])
    name = "session: CPU of services and server for a chunk p50; bare: of a run alone"
    return Figure(name=name, unit="µs", value=median(costs[0]), bare=median(costs[1]), ratio=median(ratios))


async def _first_chunk(bus: Client) -> list[Figure]:
    """Through the client, in turn: a message to a session without an open run, and a request that brings the messages
    that the session has. First each to a new session, then all to one, whose history grows by a turn each time.
    """
    known = set[str]()

    async def first_chunk_ms(asking: Awaitable[object]) -> float:
        began = time.monotonic()
        asked = asyncio.ensure_future(asking)
        async for event in events:
            if event.run not in known:
                break
        took = (time.monotonic() - began) * 1000
        known.add(event.run)
        await asked
        await bus.result(event.run)
        return took

    figures = list[Figure]()
    async with bus.subscribe("visible") as events:
        for what, grows in (("first message", False), ("message", True)):
            through, plain = list[float](), list[float]()
            session = bus.session(f"grows-{grows}")
            await session.configure(REQUEST)
            for n in range(FIRSTS + grows):
                if not grows:
                    session = bus.session(f"first-{n}")
                    await session.configure(REQUEST)
                messages = [*await session.messages(), {"role": "user", "content": ASKED}]
                of_request = await first_chunk_ms(bus.publish({**REQUEST, "messages": messages}))
                of_message = await first_chunk_ms(session.send(ASKED))
                if n or not grows:
                    plain.append(of_request)
                    through.append(of_message)
            ratio = median(a / b for a, b in zip(through, plain, strict=True))
            bare = f"the same messages, of 1 to {FIRSTS} turns" if grows else "the same message"
            name = f"session: {what} to first chunk p50; bare: a request with {bare}"
            aim = "ratio ≤ 1.1"
            figures.append(
                Figure(
                    name=name,
                    unit="ms",
                    value=median(through),
                    bare=median(plain),
                    ratio=ratio,
                    aim=aim,
                    met=ratio <= 1.1,
                )
            )
    return figures


async def _turns(bus: Client, stack: Stack) -> list[Figure]:
    """The keys of a session after so many turns, and those of as many runs alone."""
    session, keys = bus.session("turns"), stack.keys
    await session.configure(REQUEST)
    in_session, alone = list[str](), list[str]()
    for _ in range(TURNS):
        await session.send(ASKED)
    async for step in session.follow():
        if isinstance(step.event, RunEnded):
            assert step.event.run
            assert step.event.status == "completed"
            in_session.append(step.event.run)
            if len(in_session) == TURNS:
                break
    for _ in range(TURNS):
        run = await bus.publish({**REQUEST, "messages": [{"role": "user", "content": ASKED}]})
        await run.result()
        alone.append(run.id)
    ref = session_ref("", session.name)
    own = _kb(stack, [keys.session(ref), *keys.of_session(ref)])
    of_runs, of_alone = (
        _kb(stack, [key for run in runs for key in (keys.run(run), keys.log(run))]) for runs in (in_session, alone)
    )
    return [
        Figure(
            name=f"session: memory at the server of {TURNS} turns; bare: as many runs",
            unit="KB",
            value=own + of_runs,
            bare=of_alone,
            ratio=(own + of_runs) / of_alone,
        ),
        Figure(name="  of it the session's own keys", unit="KB", value=own),
    ]


def _kb(stack: Stack, keys: list[str]) -> float:
    return sum(stack.client.memory_usage(key, samples=0) or 0 for key in keys) / 1024


async def _idle(bus: Client, stack: Stack) -> list[Figure]:
    """So many sessions that have a configuration and wait for a first message."""

    def held() -> dict[str, float]:
        services = {name: resident_kb(stack.pids[name]) for name in SERVICES}
        return {"server": stack.client.info("memory")["used_memory"] / 1024, "services": sum(services.values())}

    before = held()
    left = iter(range(IDLE))

    async def configure() -> None:
        for _ in left:
            await bus.session(f"idle-{new_run_id()}").configure(REQUEST)

    await asyncio.gather(*(configure() for _ in range(AT_ONCE)))
    after, spent = held(), [cpu_s(stack.pids[name]) for name in SERVICES]
    await asyncio.sleep(IDLE_S)
    share = sum(cpu_s(stack.pids[name]) - at for name, at in zip(SERVICES, spent, strict=True)) / IDLE_S
    return [
        *(
            Figure(name=f"session: memory of an idle one, {IDLE:,} of them, {where}", unit="KB", value=grown / IDLE)
            for where, grown in ((where, after[where] - before[where]) for where in after)
        ),
        Figure(name="  CPU of the three services meanwhile, of a core", unit="%", value=100 * share),
    ]
