"""Run one script on a connection: by SHA-1, or by text if the server does not have it cached."""

from __future__ import annotations

from typing import Any

from redis.exceptions import NoPermissionError, NoScriptError

from tokenbus.bus.scripts.script import ScriptCall


class ScriptsMissing(NoScriptError):
    """The server does not have the script cached, and this user may not load scripts.

    Retryable: an administrator loads them with `tokenbus scripts`, and again after a restart of the server.
    """


async def evaluate(client: Any, call: ScriptCall) -> Any:
    """Run the script and return its reply. Raises ScriptsMissing and redis-py's errors."""
    try:
        return await client.execute_command("EVALSHA", call.script.sha, len(call.keys), *call.keys, *call.args)
    except NoScriptError:
        try:
            return await client.execute_command("EVAL", call.script.text, len(call.keys), *call.keys, *call.args)
        except NoPermissionError as e:
            # Only EVAL itself being refused means a missing script; a command refused inside the script has another
            # text.
            if "'eval'" not in str(e):
                raise
            problem = f"the server does not know the script {call.script.name!r} and this user may load none"
            raise ScriptsMissing(f"{problem}: `tokenbus scripts` does, as a user who may") from None
