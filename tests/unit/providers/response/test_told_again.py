"""All recorded streams with any part repeated wherever their API has a place for it: the run stays the same.

The places are made by machine, a few of each stream, the same ones each time.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import msgspec

from tests.rows import over_rows
from tests.unit.providers.corpus import APIS, Recording, needs_corpus, recordings
from tests.unit.providers.reading import Answer, answer, read, sse
from tokenbus.events.normalized import Done
from tokenbus.providers.response.sse import SseDecoder

pytestmark = needs_corpus

TRIES = 6
Json = Any


def events_of(row: Recording) -> list[Json]:
    framing = SseDecoder()
    events = [event.data for event in framing.feed(row.data) + framing.end()]
    return [msgspec.json.decode(data) for data in events if not data.startswith(b"[DONE]")]


def said_by(row: Recording, events: list[Json]) -> Answer:
    end = [b"data: [DONE]\n\n"] if row.api == "openai_chat" else []
    return answer(read(row.api_name, sse(*events, *end)))


# --- Responses ----------------------------------------------------------------------------------------------------

PART_ENDS = ("_text.done", "refusal.done", "content_part.done", "summary_part.done", "_call_arguments.done")


def ends_again(events: list[Json], chance: random.Random) -> None:
    """Each end of a part or an item, twice, or again later."""
    for event in [e for e in events if e["type"].endswith(".done") and "output_index" in e]:
        if chance.random() < 0.5:
            after = next(at for at, e in enumerate(events) if e is event)
            item_end = event["output_index"], "response.output_item.done"
            last = next((at for at, e in enumerate(events) if (e.get("output_index"), e["type"]) == item_end), after)
            events.insert(chance.randint(after, max(after, last)) + 1, copy.deepcopy(event))


def parts_elsewhere(events: list[Json], chance: random.Random) -> None:
    """The ends of parts count from another index than their deltas."""
    shift = chance.choice((-1, 1, 5))
    for event in events:
        if event["type"].endswith(PART_ENDS):
            for index in ("content_index", "summary_index"):
                if index in event:
                    event[index] += shift


def items_elsewhere(events: list[Json], chance: random.Random) -> None:
    """Items end at another position than they began, known by their ids."""
    shift = chance.choice((100, 7))
    known = ids_of(events)
    for event in events:
        if event["type"].endswith(".done") and "output_index" in event and known_by(event, known):
            event["output_index"] += shift


def no_positions(events: list[Json], chance: random.Random) -> None:
    """No event has a position, and all have ids."""
    known = ids_of(events)
    if all(known_by(event, known) for event in events if "output_index" in event):
        for event in events:
            event.pop("output_index", None)


def other_ids(events: list[Json], chance: random.Random) -> None:
    """Ids change from event to event, as GitHub Copilot's do."""
    for event in events:
        if "item_id" in event:
            event["item_id"] = f"id-{chance.random()}"
        if event["type"] == "response.output_item.done" and "id" in event["item"]:
            event["item"]["id"] = f"id-{chance.random()}"


def all_in_the_end(events: list[Json], chance: random.Random) -> None:
    """The final response repeats all items, some under other ids."""
    done = [copy.deepcopy(e["item"]) for e in events if e["type"] == "response.output_item.done"]
    if chance.random() < 0.5:
        for item in done:
            if "id" in item and item["type"] in ("message", "reasoning"):
                item["id"] = f"id-{chance.random()}"
    for event in events:
        whole = event["type"] in ("response.completed", "response.incomplete")
        if whole and len(event["response"].get("output") or ()) in (0, len(done)):
            event["response"]["output"] = done


def ids_of(events: list[Json]) -> set[str]:
    return {e["item"]["id"] for e in events if e["type"] == "response.output_item.added" and e["item"].get("id")}


def known_by(event: Json, known: set[str]) -> bool:
    return (event["item"].get("id") if "item" in event else event.get("item_id")) in known


# --- Chat Completions ---------------------------------------------------------------------------------------------


def whole_completion(events: list[Json], chance: random.Random) -> None:
    """A last chunk that is the whole answer."""
    result = answer(read("openai-chat", sse(*events, b"data: [DONE]\n\n")))
    if not isinstance(result.terminal, Done) or any("choices" not in e for e in events):
        return
    calls = [
        {"id": name and chance.choice((name, "x")), "type": "function", "function": {"name": tool, "arguments": args}}
        for name, tool, args in result.calls
    ]
    message = {"role": "assistant", "content": result.text or None, "refusal": result.refusal or None}
    message |= {"reasoning_content": result.thinking} if result.thinking else {}
    message |= {"tool_calls": calls} if calls else {}
    choice = {"index": 0, "message": message, "finish_reason": result.terminal.finish_raw or None}
    head = {name: events[0].get(name) for name in ("id", "model")}
    events.append({**head, "object": "chat.completion", "choices": [choice]})


def null_deltas(events: list[Json], chance: random.Random) -> None:
    """Chunks that say nothing."""
    head = {name: next((e[name] for e in events if e.get(name)), None) for name in ("id", "model", "object")}
    for _ in range(2):
        choice = {"index": 0, "delta": None, "finish_reason": None}
        events.insert(chance.randint(1, len(events)), {**head, "choices": [choice]})


# --- Anthropic ----------------------------------------------------------------------------------------------------


def first_text_in_the_start(events: list[Json], chance: random.Random) -> None:
    """The start of a block holds a beginning of its text, and the deltas say all."""
    for event in [e for e in events if e["type"] == "content_block_start"]:
        kind, index = event["content_block"]["type"], event["index"]
        if kind in ("text", "thinking") and not event["content_block"].get(kind):
            deltas = [e["delta"] for e in events if e["type"] == "content_block_delta" and e["index"] == index]
            text = "".join(delta.get(kind, "") for delta in deltas)
            event["content_block"][kind] = text[: chance.randint(0, len(text))]


def content_in_message_start(events: list[Json], chance: random.Random) -> None:
    """`message_start` holds the first blocks already."""
    content = content_of(events)
    if content:
        events[0]["message"]["content"] = content[: chance.randint(1, len(content))]


def whole_message(events: list[Json], chance: random.Random) -> None:
    """The whole message before its stop."""
    ends = [e for e in events if e["type"] == "message_delta"]
    if ends and (content := content_of(events)):
        reason = ends[-1]["delta"].get("stop_reason")
        message = {"type": "message", "id": "other", "content": content, "stop_reason": reason}
        events.insert(len(events) - 1, message)


def content_of(events: list[Json]) -> list[Json]:
    """The blocks as in a whole message; none if the stream has an unusual form."""
    starts = [e for e in events if e["type"] == "content_block_start"]
    if events[0]["type"] != "message_start" or events[0]["message"].get("content"):
        return []
    if [e["index"] for e in starts] != list(range(len(starts))) or events[-1]["type"] != "message_stop":
        return []
    content: list[Json] = []
    for start in starts:
        block = copy.deepcopy(start["content_block"])
        mine = [e["delta"] for e in events if e["type"] == "content_block_delta" and e["index"] == start["index"]]
        for kind in ("text", "thinking"):
            if block["type"] == kind:
                text, begun = "".join(delta.get(kind, "") for delta in mine), block.get(kind, "")
                block[kind] = text if text.startswith(begun) else begun + text
        written = "".join(delta.get("partial_json", "") for delta in mine)
        if block["type"] == "tool_use" and written:
            block["input"] = msgspec.json.decode(written)
        elif block["type"] not in ("text", "thinking", "redacted_thinking", "tool_use"):
            return []
        content.append(block)
    return content


# --- Gemini -------------------------------------------------------------------------------------------------------


def calls_again(events: list[Json], chance: random.Random) -> None:
    """Calls with an id, and images, repeated in the next chunk."""
    for at in range(len(events) - 1):
        for candidate in events[at].get("candidates") or ():
            parts = (candidate.get("content") or {}).get("parts") or []
            whole = [p for p in parts if "inlineData" in p or p.get("functionCall", {}).get("id")]
            again = [{**part, "thoughtSignature": None} for part in whole if "willContinue" not in str(part)]
            candidate.get("content", {}).update({"parts": parts + copy.deepcopy(again)})


Change = Callable[[list[Json], random.Random], None]
CHANGES: dict[str, list[Change]] = {
    "openai_responses": [ends_again, parts_elsewhere, items_elsewhere, no_positions, other_ids, all_in_the_end],
    "openai_chat": [whole_completion, null_deltas],
    "anthropic": [first_text_in_the_start, content_in_message_start, whole_message],
    "gemini": [calls_again],
}
CLASHING = [{items_elsewhere, other_ids}, {no_positions, other_ids}, {no_positions, items_elsewhere}]


def compact(result: Answer) -> Answer:
    """Arguments that arrived whole keep their provider's layout."""
    return msgspec.structs.replace(result, calls=[(a, b, c.replace(" ", "")) for a, b, c in result.calls])


@over_rows("row", recordings(*APIS), ids=lambda row: row.file)
def test_a_stream_that_repeats_its_parts_gives_the_same_events(row: Recording) -> None:
    try:
        events = events_of(row)
    except msgspec.DecodeError:
        return  # a stream that breaks off inside of an event, or is not a stream
    if any(not isinstance(event, dict) or "error" in str(event.get("type", "")) for event in events):
        return
    if row.expected.get("delta_vs_done_mismatch") or sum(e.get("type") == "message_start" for e in events) > 1:
        return  # its ends differ from its deltas; or it restarts, so that an index names no single block
    wanted = compact(said_by(row, events))
    for seed in range(TRIES):
        chance = random.Random(f"{row.file} {seed}")
        changes = chance.sample(CHANGES[row.api], chance.randint(1, len(CHANGES[row.api])))
        changes = [c for c in changes if not any(c in two and two & {*changes} - {c} for two in CLASHING)] or changes[
            :1
        ]
        changed = copy.deepcopy(events)
        for change in changes:
            change(changed, chance)
        found = compact(said_by(row, changed))
        assert found == wanted, [change.__name__ for change in changes]
