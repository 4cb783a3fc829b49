"""The executor's view of a tool, however it is implemented."""

from __future__ import annotations

import re
from typing import NamedTuple, Protocol

from tokenbus.tools import ToolContext
from tokenbus_services.json_schema import Schema
from tokenbus_services.tools.results import Results
from tokenbus_services.tools.tool_call import Text, ToolCall, ToolOutcome

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""The tool names that every provider accepts."""


class Tool(Protocol):
    """A way to run one tool."""

    async def run(
        self, call: ToolCall, arguments: dict[str, object], context: ToolContext, results: Results
    ) -> Text | ToolOutcome:
        """Return the result: complete, or passed through ``results`` while it arrives. Raises ToolFailure."""
        ...


class Declared(NamedTuple):
    tool: Tool
    schema: Schema
    timeout_s: float | None
    free_text: bool = False
    """Its input is text, passed as the argument ``input``."""
