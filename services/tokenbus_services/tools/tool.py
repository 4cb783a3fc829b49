"""The executor's view of a tool, however it is implemented."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from tokenbus.errors import SettingsError
from tokenbus.secret_env import FILE, secret_in
from tokenbus.tools import ToolContext
from tokenbus_services.json_schema import Schema
from tokenbus_services.tools.questions import Holding, Question
from tokenbus_services.tools.results import Results
from tokenbus_services.tools.tool_call import Text, ToolCall, ToolOutcome

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""The tool names that every provider accepts."""


class Tool(Protocol):
    """A way to run one tool."""

    async def run(
        self, call: ToolCall, arguments: dict[str, object], context: ToolContext, results: Results, *, holding: Holding
    ) -> Text | ToolOutcome | Question:
        """Return the result: complete, or passed through ``results`` while it arrives; or what the call asks, which
        has ended then. ``holding`` asks what cannot be put away. Raises ToolFailure.
        """
        ...


class Declared(NamedTuple):
    tool: Tool
    schema: Schema
    timeout_s: float | None
    free_text: bool = False
    """Its input is text, passed as the argument ``input``."""
    answer_timeout_s: float = 0.0
    """How long its questions wait if they do not say so; 0: it has none."""


_ALWAYS_PASSED = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "TZ", "USER")


def check_passed(names: Iterable[str], env: Mapping[str, str]) -> None:
    """Raises ValueError if one of these variables cannot be passed."""
    for name in names:
        if name not in env and not env.get(f"{name}{FILE}"):
            raise ValueError(f"env_pass: the environment has no {name}, nor {name}{FILE}")
        try:
            if name not in env:
                secret_in(name, env)
        except SettingsError as e:
            raise ValueError(f"env_pass: {e.where}: {e.problem}") from None


def passed_value(name: str, env: Mapping[str, str]) -> str:
    """The variable as it is, or what the file holds now that the variable with `_FILE` names; empty if it cannot be
    read.
    """
    if name in env or not env.get(f"{name}{FILE}"):
        return env.get(name, "")
    try:
        return secret_in(name, env)
    except SettingsError:
        return ""


def passed_environment(names: Iterable[str], env: Mapping[str, str]) -> dict[str, str]:
    """What a server gets that is started now."""
    return {**{name: env[name] for name in _ALWAYS_PASSED if name in env}, **{n: passed_value(n, env) for n in names}}
