"""What a run cost is on its end, through the running services, however it ended."""

from __future__ import annotations

import pytest

from tokenbus import Chunk
from tokenbus.errors import RunCancelled, RunFailed, RunIncomplete
from tokenbus.events.usage import Usage
from tokenbus.testing import CutOff, LocalBus, Reply, Stall, Status, Turn

USAGE = Usage(input=25, output=3)


async def test_cancelled_cut_and_failed_runs_report_usage_and_model() -> None:
    reply = Reply(text="one two three", usage=USAGE)
    with LocalBus() as local:
        local.model_says("stalls", Turn(says=reply, fault=Stall(after_text="two")))
        local.model_says("cut", Turn(says=reply, fault=CutOff(after_text="two")))
        local.model_says("refused", Turn(says=reply, fault=Status(status=400)))
        async with local.client() as bus:
            run = await bus.publish(local.request("stalls"))
            async for event in bus.follow(run):
                if isinstance(event, Chunk) and "two" in event.text:
                    break
            await bus.cancel(run)
            with pytest.raises(RunCancelled) as cancelled:
                await run.result()
            with pytest.raises(RunIncomplete) as cut:
                await (await bus.publish(local.request("cut"))).result()
            with pytest.raises(RunFailed) as failed:
                await (await bus.publish(local.request("refused"))).result()
            assert failed.value.retryable is failed.value.error.retryable is False
    for error in (cancelled, cut):
        result = error.value.result
        assert result
        assert result.usage
        assert result.usage.input == USAGE.input, "Anthropic reports it at message_start"
        assert result.model
        assert result.response_id
