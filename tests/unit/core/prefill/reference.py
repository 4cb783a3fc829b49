"""docs/guides/prefill.md read in the plainest way, with the whole text at hand: what `TextReader` is compared with."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import msgspec

BLANK = " \t\r\n"
NAME = r"[A-Za-z_:][A-Za-z0-9_:.-]*"
TAG = re.compile(
    rf"""<(?P<close>/)?(?P<name>(?:antml:)?(?:thinking|function_calls|invoke|parameter|function_results))"""
    rf"""(?P<attributes>(?:[ \t\r\n]+{NAME}=(?:"[^"<>]*"|'[^'<>]*'))*)[ \t\r\n]*(?P<alone>/)?>"""
)


@dataclass
class Region:
    """A block as a reader of the whole text sees it."""

    kind: str
    content: str = ""
    name: str = ""
    malformed: bool = False
    input: dict[str, Any] = field(default_factory=dict)
    closed: bool = False


def tag_at(text: str, at: int) -> re.Match[str] | None:
    found = TAG.match(text, at)
    if not found or len(found[0]) > 256:
        return None
    if found["close"] and (found["attributes"] or found["alone"]):
        return None
    return found


def local(found: re.Match[str]) -> str:
    return found["name"].removeprefix("antml:")


def name_of(found: re.Match[str]) -> str:
    given = re.search(r"""\sname=(?:"([^"]*)"|'([^']*)')""", found["attributes"])
    return (given[1] or given[2] or "") if given else ""


def first_stop(text: str, stops: tuple[str, ...]) -> int | None:
    """The end of the text before the first stop string that completes."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return end - len(stop)
    return None


def read(text: str, stops: tuple[str, ...] = (), types: dict[str, dict[str, list[str]]] | None = None) -> list[Region]:
    """The turn's blocks."""
    return Reference(text, stops, types or {}).blocks


class Reference:
    def __init__(self, text: str, stops: tuple[str, ...], types: dict[str, dict[str, list[str]]]) -> None:
        self.text, self.stops, self.types = text, stops, types
        self.blocks: list[Region] = []
        self.top(0)

    def keep(self, kind: str, content: str) -> None:
        if content.strip(BLANK):
            self.blocks.append(Region(kind, content))

    def top(self, at: int) -> None:
        text, piece = "", ""
        while True:
            tag = tag_at(self.text, at) if at < len(self.text) else None
            if tag and local(tag) in ("invoke", "parameter"):
                tag = None
            if tag or at >= len(self.text):
                cut = first_stop(piece, self.stops)
                text += piece if cut is None else piece[:cut]
                piece = ""
                if cut is not None or tag is None:
                    return self.keep("text", text)
                at = tag.end()
                if tag["close"]:
                    continue
                self.keep("text", text)
                text = ""
                if local(tag) == "function_calls":
                    return None if tag["alone"] else self.calls(at)
                if tag["alone"]:
                    continue
                after = self.thinking(at) if local(tag) == "thinking" else self.results(at)
                if after is None:
                    return None
                at = after
            else:
                piece += self.text[at]
                at += 1

    def thinking(self, at: int) -> int | None:
        text = ""
        while at < len(self.text):
            tag = tag_at(self.text, at)
            if tag and tag["close"] and local(tag) == "thinking":
                self.keep("thinking", text)
                return tag.end()
            if tag and not tag["close"] and local(tag) == "function_calls":
                self.keep("thinking", text)
                if not tag["alone"]:
                    self.calls(tag.end())
                return None
            text += self.text[at]
            at += 1
        self.keep("thinking", text)
        return None

    def results(self, at: int) -> int:
        while at < len(self.text):
            tag = tag_at(self.text, at)
            if tag and tag["close"] and local(tag) == "function_results":
                return tag.end()
            at += 1
        return at

    def calls(self, at: int) -> None:
        call: Region | None = None
        stray = False
        while at < len(self.text):
            tag = tag_at(self.text, at)
            if not tag:
                at += 1
                continue
            at = tag.end()
            match local(tag), bool(tag["close"]):
                case "function_calls", True:
                    break
                case "invoke", False:
                    if call and not stray:
                        call.malformed = True
                    call, stray = Region("tool_call", name=name_of(tag)), False
                    call.malformed = not call.name
                    self.blocks.append(call)
                    if tag["alone"]:
                        call = None
                case "invoke", True:
                    if not stray:
                        call = None
                case "parameter", False:
                    if call is None:
                        call, stray = Region("tool_call", malformed=True), True
                        self.blocks.append(call)
                    ended = at if tag["alone"] else self.parameter(call, tag, at)
                    if ended is None:
                        call.malformed = True
                        return
                    if tag["alone"]:
                        self.value(call, tag, "")
                    at = ended
                case _:
                    pass
        if call and not stray:
            call.malformed = True

    def parameter(self, call: Region, tag: re.Match[str], at: int) -> int | None:
        close = re.compile(f"</{tag['name']}[ \\t\\r\\n]*>")
        for found in close.finditer(self.text, at):
            if len(found[0]) <= 256:
                self.value(call, tag, self.text[at : found.start()])
                return found.end()
        return None

    def value(self, call: Region, tag: re.Match[str], text: str) -> None:
        name = name_of(tag)
        if not name or name in call.input:
            call.malformed = True
            return
        call.input[name] = text
        if name in self.types.get(call.name, {}):
            try:
                call.input[name] = msgspec.json.decode(text.strip(BLANK))
            except msgspec.DecodeError:
                call.malformed = True
