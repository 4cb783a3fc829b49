"""Sends script calls: one alone, or many in one round trip where the server allows it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from redis.exceptions import NoScriptError

from tokenbus.bus.scripts import Call
from tokenbus.bus.server import Server


async def send(server: Server, call: Call) -> Any:
    """Run one script. Raises what redis-py raises."""
    client = server.client
    try:
        return await client.execute_command("EVALSHA", call.script.sha, len(call.keys), *call.keys, *call.args)
    except NoScriptError:
        return await client.execute_command("EVAL", call.script.text, len(call.keys), *call.keys, *call.args)


async def send_many(server: Server, calls: Sequence[Call]) -> list[Any]:
    """Run scripts, each atomic for itself, in no order that could be relied on: in one pipeline, or in a Cluster side
    by side, for its pipelines take no scripts.

    Raises the first error, once all have ended; any of the calls may have run, so each must bear being sent again.
    """
    if not calls:
        return []
    if len(calls) == 1:
        return [await send(server, calls[0])]
    if server.topology == "cluster":
        results = await _side_by_side(server, calls)
    else:
        pipe = server.client.pipeline(transaction=False)
        for call in calls:
            pipe.execute_command("EVALSHA", call.script.sha, len(call.keys), *call.keys, *call.args)
        results: list[Any] = await pipe.execute(raise_on_error=False)
        unknown = [i for i, result in enumerate(results) if isinstance(result, NoScriptError)]
        if unknown:
            for i, result in zip(unknown, await _side_by_side(server, [calls[i] for i in unknown]), strict=True):
                results[i] = result
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


async def _side_by_side(server: Server, calls: Sequence[Call]) -> list[Any]:
    return await asyncio.gather(*(send(server, call) for call in calls), return_exceptions=True)
