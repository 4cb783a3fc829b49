"""Messages between a tool worker and its executors. An executor has one call at a time."""

from __future__ import annotations

import msgspec

from tokenbus_services.settings import PythonTool
from tokenbus_services.tools.tool_call import Text, ToolCall


class PythonWork(msgspec.Struct, frozen=True, kw_only=True):
    """What executors of tools do."""

    tools: dict[str, PythonTool]
    source: str
    """Where the tools are declared."""
    result_bytes: int
    """Longer texts of a result are cut, and larger images refused."""


class Call(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    """Call a tool."""

    number: int
    """Messages with another number are about an earlier call."""
    call: ToolCall
    deadline: float


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Cancel the call."""


class Reported(msgspec.Struct, frozen=True, array_like=True, tag="reported"):
    """The tool reported progress."""

    number: int
    progress: float
    total: float | None
    message: str | None


class Shown(msgspec.Struct, frozen=True, tag=True):
    """An image of a result."""

    data: bytes
    media_type: str


class Returned(msgspec.Struct, frozen=True, array_like=True, tag="returned"):
    """The tool returned."""

    number: int
    parts: list[Text | Shown]


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The call failed, as `ToolFailure` says."""

    number: int
    kind: str
    problem: str


to_executor = msgspec.msgpack.Decoder(Call | Cancel)
from_executor = msgspec.msgpack.Decoder(Reported | Returned | Failed)
