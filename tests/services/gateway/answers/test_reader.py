"""The reader of a run for one answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from tokenbus.events.public import PublicEvent, Started
from tokenbus_services.gateway.answers.reader import RunReader

STARTED = Started(run="r", seq=0, turn=0, attempt=1, provider="p", model="m")


async def never() -> Any:
    await asyncio.Event().wait()


async def test_a_defect_while_reading_is_raised_after_the_events_before_it() -> None:
    async def events() -> AsyncGenerator[PublicEvent]:
        yield STARTED
        raise KeyError("a defect")

    async with RunReader(events(), never) as reader:
        assert await reader.take(30) == [STARTED]
        with pytest.raises(KeyError, match="a defect"):
            await reader.take(30)
