"""A policy worker on its partition writes its policies' verdicts; its successor writes all of them again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry

from tests.contract.bus.toys import working
from tests.unit.core.run.gated_scripts import HeldStory
from tests.unit.core.run.script import RUN, text
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.liveness import Liveness
from tokenbus.bus.server.server import Server
from tokenbus.bus.stage.stage import Stage, StageOptions
from tokenbus.events import normalized as n
from tokenbus.events.frames import Drafts, PolicyVerdicts, encode, event_decoder
from tokenbus.events.public import PublicEvent
from tokenbus_services.policy_stage.run_task import GROUP
from tokenbus_services.policy_stage.service import PolicyService
from tokenbus_services.settings import PolicySettings, Settings

PASSES = PolicySettings(use="tokenbus.policy:StreamProcessor")


class Bench:
    """A run's drafts on the server, and what workers ruled on them."""

    def __init__(self, server: Server, server_url: str, keys: Keys) -> None:
        self.server, self.keys = server, keys
        self.partition = keys.partition_of(RUN)
        self.settings = Settings(
            redis_url=server_url, prefix=keys.prefix, partitions=keys.partitions, policies={"guard": PASSES}
        )

    async def accept(self) -> None:
        await self.server.client.hset(self.keys.run(RUN), "status", "open")
        await self.server.client.pexpire(self.keys.run(RUN), 60_000)

    async def draft(self, drafts: list[PublicEvent], *, over: bool = False) -> None:
        frame = encode(Drafts(("guard",), drafts, over))
        await self.server.client.xadd(self.keys.topic(self.partition, "drafts"), {RUN: frame})

    async def rulings(self) -> list[PolicyVerdicts]:
        entries = await self.server.client.xrange(self.keys.topic(self.partition, "events"))
        frames = [event_decoder.decode(frame) for _, fields in entries for frame in fields.values()]
        return [event for frame in frames for event in frame.events if isinstance(event, PolicyVerdicts)]

    async def ruled(self) -> set[tuple[str, int]]:
        """Which worker wrote the verdict on which draft."""
        return {(ruled.numbered_by, step.draft) for ruled in await self.rulings() for step in ruled.steps}

    @asynccontextmanager
    async def worker(self, name: str) -> AsyncGenerator[Stage]:
        service = PolicyService(self.settings, CollectorRegistry())
        options = StageOptions(group=GROUP, topic="drafts", worker=name, tick_s=0.05)
        stage = Stage(self.server, self.keys, options, service.logic)
        liveness = Liveness()
        await service.start(liveness)
        try:
            async with working(stage):
                await service.open(self.server, stage, liveness)
                yield stage
        finally:
            await service.close()


async def test_a_partition_that_is_loaded_as_the_service_has_stopped_starts_no_work(
    server: Server, server_url: str, keys: Keys
) -> None:
    bench, story = Bench(server, server_url, keys), HeldStory()
    story.provider(n.Start("m"), n.BlockStart(0, "text"), n.TextDelta(0, "Hel"))
    service = PolicyService(bench.settings, CollectorRegistry())
    await service.close()
    logic = service.logic(bench.partition)
    logic.apply(RUN, encode(Drafts(("guard",), story.drafts)))
    logic.discard_outputs()
    assert [task for task in asyncio.all_tasks() if task.get_name() == f"policies of {RUN}"] == []


async def test_a_second_workers_repeated_output_is_published_once(server: Server, server_url: str, keys: Keys) -> None:
    bench, story = Bench(server, server_url, keys), HeldStory()
    await bench.accept()
    story.provider(n.Start("m"), n.BlockStart(0, "text"), n.TextDelta(0, "Hel"))
    first_drafts = list(story.drafts)
    await bench.draft(first_drafts)
    async with bench.worker("first"):
        await eventually(lambda: _told(bench, len(first_drafts)))
    story.provider(n.TextDelta(0, "lo"), n.BlockStop(0), *text(1, "you"), n.Done("stop"))
    await bench.draft(story.drafts[len(first_drafts) :])
    async with bench.worker("second"):
        await eventually(lambda: _told(bench, len(first_drafts) + len(story.drafts)))
    assert len({worker for worker, _ in await bench.ruled()}) == 2
    for ruled in await bench.rulings():
        story.control(ruled)
    log: list[dict[str, Any]] = msgspec.to_builtins(story.published)
    assert "".join(e["text"] for e in log if e["type"] == "chunk") == "Helloyou"
    assert log[-1]["type"] == "completed"
    await bench.draft([], over=True)


async def test_policies_do_not_judge_a_run_that_ended(server: Server, server_url: str, keys: Keys) -> None:
    bench, story = Bench(server, server_url, keys), HeldStory()
    await bench.accept()
    await server.client.hset(keys.run(RUN), "status", "cancelling")
    story.provider(n.Start("m"), *text(0, "Hello"))
    await bench.draft(story.drafts)
    await bench.draft([], over=True)
    async with bench.worker("first"):
        stream, lease = keys.topic(bench.partition, "drafts"), keys.lease(bench.partition, GROUP)

        async def through() -> bool:
            last = await server.client.xrevrange(stream, count=1)
            return await server.client.hget(lease, "offset") == last[0][0]

        await eventually(through)
    assert await bench.rulings() == []


async def _told(bench: Bench, steps: int) -> bool:
    return len(await bench.ruled()) == steps
