"""What a tool is to the executor, whatever carries it out."""

from __future__ import annotations

import re
from typing import NamedTuple, Protocol

from tokenbus.tools import ToolContext
from tokenbus_services.json_schema.check import Schema
from tokenbus_services.tools.results import Results
from tokenbus_services.tools.tool_call import Text, ToolCall, ToolOutcome

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""What every provider takes as the name of a tool."""


class Tool(Protocol):
    """A way to run one tool."""

    async def run(
        self, call: ToolCall, arguments: dict[str, object], context: ToolContext, results: Results
    ) -> Text | ToolOutcome:
        """The result: at hand, or handed to ``results`` while it arrived. Raises ToolFailure."""
        ...


class Declared(NamedTuple):
    """One tool that may be called."""

    tool: Tool
    schema: Schema
    timeout_s: float | None
