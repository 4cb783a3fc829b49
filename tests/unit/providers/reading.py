"""Read a response with a decoder, with its bytes cut in any way, and return the events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec

from tokenbus.events import normalized as n
from tokenbus.events.quirks import ApiName, Quirks
from tokenbus.providers import registry
from tokenbus.providers.api import Decoder


def decoder(api: ApiName, *, status: int = 200, stream: bool = True, quirks: Quirks | None = None) -> Decoder:
    return registry.get(api).decoder(status=status, headers={}, stream=stream, quirks=quirks or Quirks())


def read(
    api: ApiName, data: bytes, *, status: int = 200, stream: bool = True, quirks: Quirks | None = None
) -> list[n.Normalized]:
    """The events of a whole response, given in one piece."""
    reader = decoder(api, status=status, stream=stream, quirks=quirks)
    return reader.feed(data) + reader.end()


def read_pieces(api: ApiName, pieces: Iterable[bytes], *, restored: bool = False) -> list[n.Normalized]:
    """The events of a response in pieces; ``restored``: between any two the decoder is saved and loaded."""
    reader = decoder(api)
    events: list[n.Normalized] = []
    for piece in pieces:
        events += reader.feed(piece)
        if restored:
            reader = registry.get(api).restore(msgspec.msgpack.encode(reader))
    return events + reader.end()


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    """The bytes, cut at these places."""
    edges = [0, *sorted(places), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


def sse(*events: object) -> bytes:
    """A stream of events with JSON data; bytes stand for themselves."""
    framed = [e if isinstance(e, bytes) else b"data: " + msgspec.json.encode(e) + b"\n\n" for e in events]
    return b"".join(framed)


class Answer(msgspec.Struct):
    """What an attempt's events amount to, the void part left out."""

    model: str | None
    text: str
    thinking: str
    refusal: str
    calls: list[tuple[str, str, str]]
    """Id, name, raw arguments."""
    done_calls: int
    kinds: list[str]
    """Blocks and items in the order of their ordinals."""
    open: set[int]
    """Blocks without their end."""
    terminal: n.Terminal


def answer(events: list[n.Normalized]) -> Answer:
    """Fold the events. Checks on the way what every reader of them relies on."""
    *before, terminal = events
    assert isinstance(terminal, n.Terminal), terminal
    assert not any(isinstance(event, n.Terminal) for event in before), "more than one terminal event"
    if before:
        assert isinstance(before[0], n.Start), "Start comes first"
    model = None
    kinds: dict[int, str] = {}
    texts: dict[int, list[tuple[type, str]]] = {}
    calls: dict[int, tuple[str, str]] = {}
    opened: set[int] = set()
    done = 0
    for event in before:
        match event:
            case n.Start():
                model = event.model
                for void in [ordinal for ordinal in kinds if ordinal < event.void_before]:
                    kinds.pop(void)
                    calls.pop(void, None)
                    opened.discard(void)
                done = 0
            case n.BlockStart():
                assert event.block not in kinds
                kinds[event.block] = event.kind
                opened.add(event.block)
            case n.ToolCallStart():
                assert event.block not in kinds
                assert event.tool_id
                assert event.name
                kinds[event.block] = "tool_call"
                calls[event.block] = (event.tool_id, event.name)
                opened.add(event.block)
            case n.TextDelta() | n.ThinkingDelta() | n.RefusalDelta() | n.ToolCallDelta():
                text = event.fragment if isinstance(event, n.ToolCallDelta) else event.text
                assert text, "a delta is never empty"
                assert event.block in opened, "a delta belongs to an open block"
                texts.setdefault(event.block, []).append((type(event), text))
            case n.BlockStop():
                opened.remove(event.block)
            case n.ToolCallDone():
                assert kinds[event.block] == "tool_call"
                opened.remove(event.block)
                done += 1
            case n.ItemStart():
                assert event.block not in kinds
                kinds[event.block] = event.item
                opened.add(event.block)
            case _:
                pass

    def text_of(kind: type) -> str:
        return "".join(text for block in sorted(kinds) for k, text in texts.get(block, []) if k is kind)

    arguments = {block: "".join(text for _, text in texts.get(block, [])) for block in calls}
    return Answer(
        model=model,
        text=text_of(n.TextDelta),
        thinking=text_of(n.ThinkingDelta),
        refusal=text_of(n.RefusalDelta),
        calls=[(*calls[block], arguments[block]) for block in sorted(calls)],
        done_calls=done,
        kinds=[kinds[block] for block in sorted(kinds)],
        open=opened,
        terminal=terminal,
    )


def items(events: list[n.Normalized]) -> list[tuple[str, str, str, str]]:
    """The complete items of the provider's own: type, tool, id, and JSON."""
    starts = {event.block: event for event in events if isinstance(event, n.ItemStart)}
    ended = [event.block for event in events if isinstance(event, n.BlockStop) and event.block in starts]
    json = dict.fromkeys(starts, "")
    for event in events:
        if isinstance(event, n.ToolCallDelta) and event.block in starts:
            json[event.block] += event.fragment
    return [(starts[at].item, starts[at].tool_name, starts[at].tool_id, json[at]) for at in sorted(ended)]


def item(block: int, name: str, json: str, tool: str = "", tool_id: str = "") -> list[n.Normalized]:
    """The events of an item that comes whole."""
    return [n.ItemStart(block, name, tool, tool_id), n.ToolCallDelta(block, json), n.BlockStop(block)]


def joined(events: list[n.Normalized]) -> list[n.Normalized]:
    """The events with neighbouring deltas of one block put together: what is the same for a stream and a body."""
    out: list[n.Normalized] = []
    for event in events:
        last = out[-1] if out else None
        match event, last:
            case (n.ToolCallDelta(), n.ToolCallDelta()) if event.block == last.block:
                out[-1] = n.ToolCallDelta(event.block, last.fragment + event.fragment)
            case (n.TextDelta(), n.TextDelta()) | (n.ThinkingDelta(), n.ThinkingDelta()) if event.block == last.block:
                out[-1] = type(event)(event.block, last.text + event.text)
            case _:
                out.append(event)
    return out
