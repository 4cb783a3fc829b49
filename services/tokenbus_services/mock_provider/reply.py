"""What the model says, independent of any API. Each API's module converts a `Reply` to its wire format.

Strings in a reply may contain placeholders, filled from the request, so that runs of one script differ and a test can
still compute the expected output with `filled`.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tokenbus.events.usage import Usage

TOKEN = "{token}"
"""Placeholder: the last word of the user's last message."""
TOOL_RESULT = "{tool_result}"
"""Placeholder: this turn's tool results, joined by a space."""
STAMP = "<monotonic-ns-here>"
"""Placeholder: `time.monotonic_ns()` when the read is written, with the same number (19) of digits."""

Finish = Literal["stop", "length", "tool_use", "content_filter"]

_WORD = re.compile(r"\s*\S+|\s+")
_ARGUMENT_SIZE = 6
"""Characters per fragment of arguments if text is split by words: JSON has few spaces."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call. ``arguments`` as a string is sent as it is, so that a test may send broken JSON."""

    name: str
    arguments: dict[str, object] | str = {}
    id: str | None = None
    """None: derived from the conversation, so distinct over turns and runs."""
    free_text: bool = False
    """The call of a custom tool: ``arguments`` is its input (OpenAI's APIs)."""

    @property
    def raw(self) -> str:
        """The argument string on the wire."""
        if isinstance(self.arguments, str):
            return self.arguments
        return msgspec.json.encode(self.arguments).decode()


class Picture(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One image that the model makes; in JSON its bytes are base64."""

    data: bytes
    media_type: str = "image/png"
    previews: tuple[bytes, ...] = ()
    """As many of them are sent as the request asks for."""
    revised_prompt: str = ""


class Reply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="reply"):
    """One turn of the model: thinking, then text, then pictures, then tool calls, each left out if empty."""

    text: str = ""
    thinking: str = ""
    signature: str = "c2lnbmVkIGJ5IHRoZSByZXBsYXkgcHJvdmlkZXI="
    """Sent with thinking, if the API has signatures."""
    pictures: tuple[Picture, ...] = ()
    """For the APIs whose models make images; the others refuse."""
    tool_calls: tuple[ToolCall, ...] = ()
    finish: Finish | None = None
    """None: ``tool_use`` with tool calls, else ``stop``."""
    usage: Usage | None = None
    """None: an invented input, and as many output tokens as there are pieces."""
    stop_string: str = ""
    """Set by `continued`: what the provider stopped on."""
    chunk_size: Annotated[int, Meta(ge=1)] | None = None
    """Characters a delta; None: a word, as models do."""

    @property
    def finish_reason(self) -> Finish:
        """Why the turn ends."""
        return self.finish or ("tool_use" if self.tool_calls else "stop")

    @property
    def reported_usage(self) -> Usage:
        """The usage to report."""
        if self.usage is not None:
            return self.usage
        thinking = len(self.text_deltas(self.thinking))
        spoken = len(self.text_deltas(self.text)) + sum(len(self.argument_deltas(call.raw)) for call in self.tool_calls)
        return Usage(input=25, output=thinking + spoken, reasoning=thinking or None)

    def text_deltas(self, text: str) -> list[str]:
        """The deltas of a text; they concatenate to it exactly."""
        return _WORD.findall(text) if self.chunk_size is None else _slices(text, self.chunk_size)

    def argument_deltas(self, arguments: str) -> list[str]:
        """The deltas of a tool call's arguments; they concatenate to it exactly."""
        return _slices(arguments, self.chunk_size or _ARGUMENT_SIZE)

    def with_marks_filled(self, *, token: str = "", tool_results: tuple[str, ...] = ()) -> Reply:
        """The reply with its marks filled in, all but `STAMP`; inside arguments they are escaped as JSON text."""
        values = {TOKEN: token, TOOL_RESULT: " ".join(tool_results)}

        def fill(text: str, *, json: bool = False) -> str:
            for mark, value in values.items():
                if mark in text:
                    text = text.replace(mark, msgspec.json.encode(value).decode()[1:-1] if json else value)
            return text

        return msgspec.structs.replace(
            self,
            text=fill(self.text),
            thinking=fill(self.thinking),
            tool_calls=tuple(
                msgspec.structs.replace(call, arguments=fill(call.raw, json=not call.free_text))
                for call in self.tool_calls
            ),
        )

    def continue_text(self, before: str, stops: tuple[str, ...]) -> Reply:
        """Continue this text as a provider would; its end may already be the beginning of the reply.

        Stops at the first stop string, which is not included.
        """
        repeated = next(size for size in range(len(self.text), -1, -1) if before.endswith(self.text[:size]))
        rest = self.text[repeated:]
        ends = [(at, stop) for stop in stops if (at := rest.find(stop)) >= 0]
        if not ends:
            return msgspec.structs.replace(self, text=rest)
        at, stop = min(ends)
        return msgspec.structs.replace(self, text=rest[:at], stop_string=stop)


def _slices(text: str, size: int) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]
