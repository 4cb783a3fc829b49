"""Run script calls: by SHA-1, or by text if the server does not have it cached; many in as few commands as possible."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from redis.exceptions import NoPermissionError, NoScriptError, ResponseError

from tokenbus.bus.liveness import together
from tokenbus.bus.scripts import ScriptCall, joined
from tokenbus.bus.server.error_replies import is_alien
from tokenbus.bus.server.server import Server

JOINED_BYTES = 2**20
"""Maximum bytes of arguments per command, so that no command blocks the server for long."""
JOINED_VALUES = 4000
"""The same for its keys and arguments: a server takes about 2 µs for each."""


class ScriptsMissing(NoScriptError):
    """The server does not have the script cached, and this user may not load scripts.

    Retryable: an administrator loads them with `tokenbus scripts`, and again after a restart of the server.
    """


async def run_script(server: Server, call: ScriptCall) -> Any:
    """Run one script and return its reply. Raises ScriptsMissing and redis-py's errors; NotReplicated for a durable
    call that may be sent again.
    """
    execute = partial(_durably, server) if call.durable else server.client.execute_command
    try:
        return await execute("EVALSHA", call.script.sha, len(call.keys), *call.keys, *call.args)
    except NoScriptError:
        try:
            return await execute("EVAL", call.script.text, len(call.keys), *call.keys, *call.args)
        except NoPermissionError as e:
            # Only EVAL itself being refused means a missing script; a command refused inside the script has another
            # text.
            if "'eval'" not in str(e):
                raise
            problem = f"the server does not know the script {call.script.name!r} and this user may load none"
            raise ScriptsMissing(f"{problem}: `tokenbus scripts` does, as a user who may") from None


async def _durably(server: Server, *command: Any) -> Any:
    """Execute the command and wait for its writes, on one connection: the server that was asked is the one that
    answers.
    """
    reply, waited = await server.client.execute_together(command, server.durability.command)
    if isinstance(reply, Exception):
        raise reply
    if isinstance(waited, Exception):
        raise waited
    server.durability.check(waited)
    return reply


async def run_each(server: Server, calls: Sequence[ScriptCall]) -> list[Any]:
    """Like `run_scripts`, but a call whose key has the wrong type gets that error as its reply, and the others get
    theirs.
    """
    try:
        return await run_scripts(server, calls)
    except ResponseError as e:
        if not is_alien(e):
            raise
        if len(calls) == 1:
            return [e]
    return [reply for call in calls for reply in await run_each(server, [call])]


async def run_scripts(server: Server, calls: Sequence[ScriptCall]) -> list[Any]:
    """Run scripts in no guaranteed order; the replies are in the order of the calls.

    Calls of the same script become one command, so that a blocked reader wakes up once and finds all of their writes.
    In a Cluster that is not possible, and all calls run in parallel. Raises the first error after all calls have ended;
    any call may have run, so each must be idempotent.
    """
    groups = [[i] for i in range(len(calls))] if server.topology == "cluster" else _together(calls)
    sending = [_run_group(server, [calls[i] for i in group]) for group in groups]
    if len(sending) == 1:
        return _checked(await sending[0])
    replies: list[Any] = [None] * len(calls)
    for group, answer in zip(groups, await together(sending), strict=True):
        for i, reply in zip(group, answer if isinstance(answer, list) else [answer] * len(group), strict=True):
            replies[i] = reply
    return _checked(replies)


async def _run_group(server: Server, calls: list[ScriptCall]) -> list[Any]:
    return [await run_script(server, calls[0])] if len(calls) == 1 else await run_script(server, joined(calls))


def _together(calls: Sequence[ScriptCall]) -> list[list[int]]:
    """Indexes of the calls, grouped by command."""
    if len(calls) == 1:
        return [[0]]
    groups: list[list[int]] = []
    open_groups: dict[str, tuple[list[int], int, int]] = {}
    for i, call in enumerate(calls):
        size = sum([len(arg) for arg in call.args if type(arg) is bytes])
        values = (len(call.keys) + len(call.args)) * call.script.weight
        group, held, counted = open_groups.get(call.script.sha, ([], 0, 0))
        if group and (held + size > JOINED_BYTES or counted + values > JOINED_VALUES):
            group, held, counted = [], 0, 0
        if not group:
            groups.append(group)
        group.append(i)
        open_groups[call.script.sha] = group, held + size, counted + values
    return groups


def _checked(replies: list[Any]) -> list[Any]:
    for reply in replies:
        if isinstance(reply, BaseException):
            raise reply
    return replies
