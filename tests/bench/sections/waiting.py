"""What runs cost that wait for a person or a client, ten thousand of them: memory, keys, and CPU."""

from __future__ import annotations

import asyncio

from tests.bench.figures import Figure
from tests.bench.procs import cpu_s, resident_kb
from tests.bench.stack import PROVIDER, SERVICES, Stack, running
from tests.waiting import eventually
from tokenbus import Client, Waiting
from tokenbus_services.mock_provider import Reply, Script, ToolCall, Turn

MODEL = "asks"
RUNS, AT_ONCE = 10_000, 50
MEANWHILE_S = 10.0
TOOL = {"name": "where", "kind": "client", "description": "Where the user is.", "parameters": {"type": "object"}}
REQUEST = {
    "provider": PROVIDER,
    "model": MODEL,
    "messages": [{"role": "user", "content": "Where am I?"}],
    "tools": [{**TOOL, "timeout_s": 86_400}],
}


def waited() -> list[Figure]:
    """Runs whose call waits for a client, on a stack of their own."""
    calls = Turn(says=Reply(text="Let me look.", tool_calls=(ToolCall(name="where", arguments={}),)))
    with running([], scripts={MODEL: Script(turns=(calls, Turn(says=Reply(text="So there."))))}) as stack:
        return asyncio.run(_measured(stack))


async def _measured(stack: Stack) -> list[Figure]:
    port: int = stack.client.connection_pool.connection_kwargs["port"]

    def held() -> dict[str, float]:
        parts = {name: resident_kb(stack.pids[name]) for name in SERVICES}
        return {"server": stack.client.info("memory")["used_memory"] / 1024, **parts}

    def keys() -> int:
        return stack.client.dbsize()

    async with Client(f"redis://127.0.0.1:{port}") as bus:
        bare = await _share(stack)
        before, keys_before, left = held(), keys(), iter(range(RUNS))
        wanted: dict[str, asyncio.Event] = {}

        async def begin() -> None:
            for _ in left:
                run = await bus.publish(REQUEST)
                await wanted.setdefault(run.id, asyncio.Event()).wait()

        async with bus.subscribe("runs", kinds=Waiting) as events:
            begun = [asyncio.create_task(begin()) for _ in range(AT_ONCE)]
            seen = 0
            async for event in events:
                wanted.setdefault(event.run, asyncio.Event()).set()
                seen += 1
                if seen == RUNS:
                    break
        await asyncio.gather(*begun)
        await eventually(lambda: _away(stack) == RUNS, timeout=600)
        after = held()
        share = await _share(stack)
        return [
            *(
                Figure(name=f"waiting: memory of one, {RUNS:,} of them, {where}", unit="KB", value=grown / RUNS)
                for where, grown in ((where, after[where] - before[where]) for where in after)
            ),
            Figure(name="  keys of one", unit="", value=(keys() - keys_before) / RUNS),
            Figure(
                name="  CPU of the services meanwhile, of a core; bare: before",
                unit="%",
                value=share,
                bare=bare,
                ratio=share / bare,
            ),
        ]


def _away(stack: Stack) -> int:
    """How many runs are put away, and in no worker."""
    leases = [stack.client.hmget(key, "away", "open") for key in stack.client.scan_iter("*:lease:parser")]
    return sum(int(away or 0) - int(left or 0) for away, left in leases)


async def _share(stack: Stack) -> float:
    """The CPU of the services while nothing happens, in % of a core."""
    spent = [cpu_s(stack.pids[name]) for name in SERVICES]
    await asyncio.sleep(MEANWHILE_S)
    return 100 * sum(cpu_s(stack.pids[name]) - at for name, at in zip(SERVICES, spent, strict=True)) / MEANWHILE_S
