"""The built-in policy that needs more than the library's dependencies. The others are in `tokenbus.policy`."""

from __future__ import annotations

from typing import Any

import msgspec

from tokenbus.policy.builtin.tool_call_gate import Block, ToolCallGate, Verdict
from tokenbus.policy.processor import StreamContext
from tokenbus.policy.stream_state import ToolCallStreamBlock
from tokenbus_services.json_schema import SchemaError, compile_schema

__all__ = ["ArgumentSchemas", "ArgumentSchemasOptions"]


class ArgumentSchemasOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A JSON schema per tool whose calls are checked."""

    schemas: dict[str, dict[str, Any]]
    notice: str = ""
    """Sent in place of a blocked call; ``{tool}`` is its name. Empty: nothing is sent."""


class ArgumentSchemas(ToolCallGate):
    """Releases a call if its arguments are a JSON object that matches its tool's schema. Tools without a schema are
    not checked. Raises ValueError for an invalid schema.
    """

    Options = ArgumentSchemasOptions
    options: ArgumentSchemasOptions

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        try:
            self._schemas = {name: compile_schema(schema) for name, schema in self.options.schemas.items()}
        except SchemaError as e:
            raise ValueError(f"schemas: {e}") from e

    async def judge(self, call: ToolCallStreamBlock, context: StreamContext[Any]) -> Verdict:
        if (schema := self._schemas.get(call.name)) is None:
            return None
        try:
            arguments = msgspec.json.decode(call.arguments or "{}", type=dict[str, object])
            problems = schema.problems(arguments)
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeEncodeError) as e:
            problems = [f"not a JSON object: {e}"]
        if not problems:
            return None
        return Block("; ".join(problems), self.options.notice.replace("{tool}", call.name))
