"""Runs one script on a connection: by its SHA-1, and by its text where the server does not know it."""

from __future__ import annotations

from typing import Any

from redis.exceptions import NoPermissionError, NoScriptError

from tokenbus.bus.scripts.script import ScriptCall


class ScriptsMissing(NoScriptError):
    """The server does not know the script, and this user may run only what an administrator has loaded.

    It passes: `tokenbus scripts` loads them, and again after a restart of the server.
    """


async def evaluate(client: Any, call: ScriptCall) -> Any:
    """The script's reply. Raises ScriptsMissing, and what redis-py raises."""
    try:
        return await client.execute_command("EVALSHA", call.script.sha, len(call.keys), *call.keys, *call.args)
    except NoScriptError:
        try:
            return await client.execute_command("EVAL", call.script.text, len(call.keys), *call.keys, *call.args)
        except NoPermissionError as e:
            # What the script itself may not do is refused in words of its own, and is not for want of loading.
            if "'eval'" not in str(e):
                raise
            problem = f"the server does not know the script {call.script.name!r} and this user may load none"
            raise ScriptsMissing(f"{problem}: `tokenbus scripts` does, as a user who may") from None
