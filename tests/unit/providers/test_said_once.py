"""Content that a provider repeats is emitted once: repeats are found by an item's id, its place, or its text."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.rows import over_rows
from tests.unit.providers.reading import Answer, answer, read, sse
from tokenbus.events.normalized import Cut, Done, Extra, Failed, ToolCallDone, ToolCallStart
from tokenbus.events.quirks import ApiName, Quirks

CREATED = {"type": "response.created", "response": {"id": "r", "model": "m", "tools": []}}


def event(name: str, index: int | None = 0, /, **fields: Any) -> dict[str, Any]:
    where = {} if index is None else {"output_index": index}
    return {"type": f"response.{name}", **where, **fields}


def item(name: str, index: int | None, kind: str = "", /, **fields: Any) -> dict[str, Any]:
    return event(f"output_item.{name}", index, item={"type": kind, **fields})


def completed(*output: Any, **response: Any) -> dict[str, Any]:
    return {"type": "response.completed", "response": {"status": "completed", "output": [*output], **response}}


def texts(*expected: str, kind: str = "output_text") -> list[dict[str, Any]]:
    return [{"type": kind, "text": text} for text in expected]


def message(*expected: str, **fields: Any) -> dict[str, Any]:
    return {"type": "message", "content": texts(*expected), **fields}


def said_by(api: ApiName, *events: Any) -> Answer:
    return answer(read(api, sse(*events)))


def responses(*events: Any) -> Answer:
    return said_by("openai-responses", CREATED, *events)


def deltas(*pieces: str, index: int | None = 0, content_index: int = 0, **fields: Any) -> list[dict[str, Any]]:
    return [event("output_text.delta", index, content_index=content_index, delta=piece, **fields) for piece in pieces]


HA = ("ha", " ", "ha")
BEGUN = [item("added", 0, "message", id="m", content=[]), *deltas(*HA, content_index=1, item_id="m")]


@over_rows(
    "end",
    [
        [event("output_text.done", 0, content_index=0, text="ha ha", item_id="m")],
        [event("output_text.done", 0, content_index=1, text="ha ha", item_id="m")],
        [event("output_text.done", 0, content_index=7, text="ha ha\n", item_id="m")] * 2,
        [event("output_text.done", 4, content_index=0, text="ha ha", item_id="m")],
        [event("output_text.done", None, content_index=0, text="ha ha", item_id="m")],
        [event("output_text.done", 0, content_index=0, text="ha ha")],
        [event("content_part.done", 0, content_index=0, part=texts("ha ha")[0])] * 2,
        [event("content_part.done", 0, content_index=0)],
        [item("done", 0, "message", id="m", content=texts("ha ha"))] * 2,
        [item("done", 3, "message", id="m", content=texts("ha ha"))],
        [item("done", None, "message", id="m", content=texts("ha ha"))],
        [item("done", 0, "message", id="other", content=texts("ha ha"))],
        [item("done", 3, "message", id="other", content=texts("ha ha"))],
        [item("done", 0, "message", id="m", content=texts("ha", " ha"))],
        [item("done", 0, "message", id="m", content=texts("ha ha", kind="refusal_text"))],
        [item("added", 0, "message", id="m", content=texts("ha ha"))],
        [],
    ],
)
@over_rows("output", [[], [message("ha ha", id="m")], [message("ha ha")], [message("ha", " ha", id="x")]])
def test_text_of_deltas_is_emitted_once_at_any_end(end: list[Any], output: list[Any]) -> None:
    result = responses(*BEGUN, *end, completed(*output))
    assert (result.text, result.kinds, result.open, result.terminal) == (
        "ha ha",
        ["text"],
        set(),
        Done("stop", "completed"),
    )


@over_rows("numbers", list(product(range(3), repeat=3)), ids=str)
@over_rows("spoken", [("ha ha",), ("Hello", "you"), ("Hello", "Hello")])
@over_rows("kind", ["output_text", "refusal"])
def test_each_type_of_event_may_number_the_parts_of_a_message_in_its_own_way(
    numbers: tuple[int, int, int], spoken: tuple[str, ...], kind: str
) -> None:
    field = "text" if kind == "output_text" else kind
    streamed: list[Any] = []
    for at, text in enumerate(spoken):
        by_delta, by_done, by_part = (number + at for number in numbers)
        streamed += [
            *(event(f"{kind}.delta", content_index=by_delta, delta=piece) for piece in (text[:2], text[2:])),
            event(f"{kind}.done", content_index=by_done, **{field: text}),
            event("content_part.done", content_index=by_part, part={"type": kind, field: text}),
        ]
    content = [{"type": kind, field: text} for text in spoken]
    whole = {"type": "message", "id": "m", "content": content}
    result = responses(item("added", 0, "message", id="m"), *streamed, item("done", 0, **whole), completed(whole))
    assert result.text + result.refusal == "".join(spoken)
    assert (result.kinds, result.open) == (["text"] * len(spoken), set())


def test_citations_that_come_only_with_the_final_form_are_of_its_text() -> None:
    cited = [{"type": "output_text", "text": "ha ha", "annotations": [{"type": "url_citation", "url": "u"}]}]
    whole = {"type": "message", "id": "m", "content": cited}
    added = event("output_text.annotation.added", content_index=1, annotation=cited[0]["annotations"][0], item_id="m")
    for before in ([], [added]):
        for ends in ([item("done", 0, **whole)], [], [item("done", 0, **whole)] * 2):
            events = read("openai-responses", sse(CREATED, *BEGUN, *before, *ends, completed(whole)))
            found = [e for e in events if isinstance(e, Extra)]
            assert found == [Extra("openai-responses.annotation", '{"type":"url_citation","url":"u"}', 0)]


def test_text_that_occurs_twice_is_emitted_twice() -> None:
    two = [item("added", 0, "message", id="m"), *deltas("ha"), item("done", 0, "message", id="m", content=texts("ha"))]
    more = [item("added", 1, "message", id="n"), *deltas("ha", "ha", index=1)]
    result = responses(*two, *more, completed(message("ha", id="m"), message("haha", id="n")))
    assert (result.text, result.kinds) == ("hahaha", ["text", "text"])
    done_alone = [item("done", at, "message", content=texts("ha")) for at in (0, 1)]
    assert responses(*done_alone, completed(message("ha"), message("ha"))).text == "haha"
    parts = item("done", 0, "message", content=texts("ha", "ha"))
    for streamed in ([], deltas("ha"), deltas("ha", content_index=1)):
        assert responses(*streamed, parts, completed(message("ha", "ha"))).text == "haha"
    both = [event("output_text.done", 0, content_index=at, text="ha") for at in (0, 1)]
    assert responses(*deltas("ha"), *both, completed(message("ha", "ha"))).text == "haha"


def test_items_with_one_id_are_as_many_as_their_texts() -> None:
    one = [
        item("added", None, "message", id="m"),
        *deltas("a", index=None, item_id="m"),
        item("done", None, "message", id="m", content=texts("a")),
    ]
    other = [
        item("added", None, "message", id="m"),
        *deltas("b", index=None, item_id="m"),
        item("done", None, "message", id="m", content=texts("b")),
    ]
    result = responses(*one, *other, completed(message("a", id="m"), message("b", id="m")))
    assert (result.text, result.kinds) == ("ab", ["text", "text"])
    assert responses(*one, *one[::2], completed(message("a", id="m"))).text == "a"


@pytest.mark.parametrize("streamed", [[], [item("added", 0, "message", id="m", content=[])]])
def test_text_only_in_the_response_at_its_end_is_emitted(streamed: list[Any]) -> None:
    assert responses(*streamed, completed(message("Hello", id="m"))).text == "Hello"
    empty = item("done", 0, "message", id="m", content=[])
    assert responses(*streamed, empty, completed(message("Hello", id="m"))).text == "Hello"
    reasoning = item("done", 0, "reasoning", id="rs", summary=[])
    assert responses(reasoning, completed({"type": "reasoning", "id": "rs"}, message("Hello"))).text == "Hello"


def test_what_deltas_left_out_the_item_says() -> None:
    half = [item("added", 0, "message", id="m"), *deltas("Hel", content_index=1)]
    assert responses(*half, item("done", 0, "message", content=texts("Hello", "!")), completed()).text == "Hello!"
    assert responses(*half, completed(message("Hello", "!", id="m"))).text == "Hello!"


def test_a_refusal_is_emitted_once_and_stays_a_refusal() -> None:
    begun = [event("refusal.delta", 0, content_index=1, delta=piece) for piece in ("I ", "can't.")]
    whole = {"type": "message", "content": [{"type": "refusal", "refusal": "I can't."}]}
    ends = [event("refusal.done", 2, content_index=0, refusal="I can't."), item("done", 0, **whole)]
    for end in ([], ends, ends[1:], [event("content_part.done", 0, content_index=0, part=whole["content"][0])]):
        result = responses(*begun, *[e for e in end if e.get("output_index") == 0], completed(whole))
        assert (result.refusal, result.text, result.terminal) == ("I can't.", "", Done("content_filter", "completed"))
    as_text = responses(*deltas("I can't."), completed(whole))
    assert (as_text.text, as_text.refusal, as_text.terminal) == ("I can't.", "", Done("content_filter", "completed"))
    assert responses(completed(whole)).refusal == "I can't."


@pytest.mark.parametrize("ids", [{}, {"item_id": "rs"}])
def test_the_models_words_and_a_summary_of_the_same_text_are_one_thinking(ids: dict[str, str]) -> None:
    raw = [event("reasoning_text.delta", 0, content_index=0, delta=piece, **ids) for piece in ("Hm", " so")]
    summed = [event("reasoning_summary_text.delta", 0, summary_index=0, delta=piece, **ids) for piece in ("H", "m so")]
    summary_done = event("reasoning_summary_text.done", 0, summary_index=0, text="Hm so", **ids)
    raw_done = event("reasoning_text.done", 0, content_index=3, text="Hm so", **ids)
    begin = item("added", 0, "reasoning", id="rs", summary=[])
    both = {"type": "reasoning", "id": "rs", "summary": texts("Hm so"), "content": texts("Hm so")}
    for streamed in (
        [*raw, summary_done],
        [*raw, *summed],
        [*raw, raw_done, *summed, summary_done],
        [*summed, summary_done, *raw, raw_done],
        [x for pair in zip(raw, summed, strict=True) for x in pair],
    ):
        for end in ([item("done", 0, **both)], []):
            result = responses(begin, *streamed, *end, completed(both))
            assert (result.thinking, result.kinds, result.open) == ("Hm so", ["thinking"], set())


def test_a_summary_of_another_text_is_emitted_in_addition_to_the_models_words() -> None:
    raw = event("reasoning_text.delta", 0, content_index=0, delta="Long words.")
    summed = event("reasoning_summary_text.delta", 0, summary_index=0, delta="Short.")
    result = responses(raw, summed, item("done", 0, "reasoning", summary=texts("Short.")), completed())
    assert (result.thinking, result.kinds) == ("Long words.Short.", ["thinking", "thinking"])


ARGUMENTS = '{"a": [1, 2]}'


@pytest.mark.parametrize(
    ("added", "done"),
    [
        ((1, {"id": "fc", "call_id": "c"}), (2, {"id": "fc", "call_id": "c"})),
        ((1, {"id": "fc", "call_id": "c"}), (2, {"id": "other", "call_id": "c"})),
        ((0, {"id": "fc"}), (5, {"id": "fc", "call_id": "c"})),
        ((0, {"call_id": "c"}), (5, {"id": "x", "call_id": "x"})),
        ((0, {}), (5, {})),
        ((None, {"call_id": "c"}), (None, {"call_id": "c"})),
        ((0, {"id": "fc", "call_id": "c"}), (0, {"id": "rotated", "call_id": "rotated"})),
    ],
)
@pytest.mark.parametrize("streamed", [True, False])
def test_a_call_announced_at_one_place_and_ended_at_another_is_one(added: Any, done: Any, streamed: bool) -> None:
    (at, begun), (end, ended) = added, done
    own = begun.get("id") or begun.get("call_id") or "?"
    pieces = [event("function_call_arguments.delta", at, item_id=own, delta=ARGUMENTS[i : i + 5]) for i in (0, 5, 10)]
    known = streamed or at == end or set(begun.values()) & set(ended.values())
    whole = {"type": "function_call", "name": "f", "arguments": ARGUMENTS, **(ended if known else {})}
    for output in ([], [whole]):
        result = responses(
            item("added", at, "function_call", name="f", arguments="", **begun),
            *(pieces if streamed else []),
            *([event("function_call_arguments.done", at, item_id=own, arguments=ARGUMENTS)] if streamed else []),
            item("done", end, **whole),
            completed(*output),
        )
        assert [call[1:] for call in result.calls] == [("f", ARGUMENTS)]
        assert (result.done_calls, result.open, result.terminal) == (1, set(), Done("tool_use", "completed"))


def test_calls_with_one_id_or_of_one_text_are_as_many_as_they_are() -> None:
    calls = [{"type": "function_call", "call_id": name, "name": "f", "arguments": "{}", "id": "same"} for name in "ab"]
    for index in ((0, 1), (None, None), (0, 0)):
        ends = [item(name, at, **call) for at, call in zip(index, calls, strict=True) for name in ("added", "done")]
        result = responses(*ends, completed(*calls))
        assert result.calls == [("a", "f", "{}"), ("b", "f", "{}")]
        assert result.done_calls == 2


def test_a_stream_without_positions_is_read_by_ids() -> None:
    """As llama.cpp writes it: no output_index, all items end when the response does, a call's id is its call_id."""
    call = {"type": "function_call", "call_id": "fc_1", "name": "f", "arguments": ARGUMENTS, "status": "completed"}
    second = {**call, "call_id": "fc_2", "arguments": "{}"}
    thought = {"type": "reasoning", "id": "rs", "summary": [], "content": texts("Hm", kind="reasoning_text")}
    pieces = [
        event("function_call_arguments.delta", None, item_id="fc_1", delta=ARGUMENTS[:5]),
        event("function_call_arguments.delta", None, item_id="fc_1", delta=ARGUMENTS[5:]),
    ]
    result = responses(
        item("added", None, "reasoning", id="rs", summary=[], content=[]),
        event("reasoning_text.delta", None, item_id="rs", delta="H"),
        event("reasoning_text.delta", None, item_id="rs", delta="m"),
        item("added", None, "message", id="m", content=[]),
        event("content_part.added", None, item_id="m", part=texts("")[0]),
        *deltas("Look", ".", index=None, item_id="m"),
        item("added", None, **{**call, "arguments": "", "status": "in_progress"}),
        *pieces,
        item("added", None, **{**second, "arguments": ""}),
        event("function_call_arguments.delta", None, item_id="fc_2", delta="{}"),
        item("done", None, **thought),
        event("output_text.done", None, item_id="m", text="Look."),
        event("content_part.done", None, item_id="m", part=texts("Look.")[0]),
        item("done", None, **message("Look.", id="m")),
        item("done", None, **call),
        item("done", None, **second),
        completed(thought, message("Look.", id="m"), call, second),
    )
    assert (result.thinking, result.text) == ("Hm", "Look.")
    assert result.calls == [("fc_1", "f", ARGUMENTS), ("fc_2", "f", "{}")]
    assert result.kinds == ["thinking", "text", "tool_call", "tool_call"]
    assert (result.done_calls, result.open, result.terminal) == (2, set(), Done("tool_use", "completed"))


# --- Chat Completions ---------------------------------------------------------------------------------------------

DONE = b"data: [DONE]\n\n"
CALL = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}


def chunk(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {"id": "c1", "object": "chat.completion.chunk", "model": "m", "choices": [choice]}


def whole(finish: str = "stop", form: str = "chat.completion", **message: Any) -> dict[str, Any]:
    """The last chunk of MiniMax: the whole answer, with counts."""
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    return {"id": "c1", "object": form, "model": "m", "choices": [choice], "usage": usage}


def chat(*events: Any) -> Answer:
    return said_by("openai-chat", *events, DONE)


def argued(*pieces: str, index: int = 0, tool_id: str = "c") -> list[dict[str, Any]]:
    first = {**CALL, "index": index, "id": tool_id, "function": {"name": "f", "arguments": ""}}
    further = [{"index": index, "function": {"arguments": piece}} for piece in pieces]
    return [chunk(tool_calls=[call]) for call in (first, *further)]


@pytest.mark.parametrize("form", ["chat.completion", "chat.completion.chunk", ""])
@pytest.mark.parametrize("streamed", [True, False])
def test_a_whole_completion_after_its_deltas_is_emitted_once(form: str, streamed: bool) -> None:
    pieces = [chunk(reasoning_content="H"), chunk(reasoning_content="m"), *(chunk(content=piece) for piece in HA)]
    pieces += argued(ARGUMENTS[:4], ARGUMENTS[4:])
    last = whole("tool_calls", form, content="ha ha", reasoning_content="Hm", tool_calls=[CALL])
    result = chat(*(pieces if streamed else []), last)
    assert (result.text, result.thinking, result.calls) == ("ha ha", "Hm", [("c", "f", ARGUMENTS)])
    assert (result.kinds, result.done_calls, result.open) == (["thinking", "text", "tool_call"], 1, set())
    assert isinstance(result.terminal, Done)
    assert (result.terminal.finish, result.terminal.usage and result.terminal.usage.total) == ("tool_use", 3)


def test_what_deltas_left_out_the_whole_completion_says() -> None:
    result = chat(chunk(content="Hel"), whole("tool_calls", content="Hello", tool_calls=[CALL]))
    assert (result.text, result.calls) == ("Hello", [("c", "f", ARGUMENTS)])
    other = chat(chunk(content="Hello there"), whole(content="Quite another text"))
    assert other.text == "Hello there"


def test_messages_in_place_of_deltas_or_beside_them_are_pieces() -> None:
    beside = [chunk(content=piece) for piece in HA]
    for event, piece in zip(beside, HA, strict=True):
        event["choices"][0]["message"] = {"content": piece}
    assert chat(*beside, chunk("stop")).text == "ha ha"
    pieces = [whole(form="chat.completion.chunk", content=piece) for piece in ("ha", "ha")]
    assert chat(*pieces).text == "haha"


def test_a_whole_completions_calls_are_known_by_id_or_place() -> None:
    two = [*argued("{}", tool_id="a"), *argued(ARGUMENTS, index=1, tool_id="b")]
    first, second = ({**CALL, "function": {"name": "f", "arguments": arguments}} for arguments in ("{}", ARGUMENTS))
    for ids in ("ab", "xy", ("", "")):
        again = [{**call, "id": name, "index": None} for call, name in zip((first, second), ids, strict=True)]
        assert chat(*two, whole("tool_calls", tool_calls=again)).calls == [("a", "f", "{}"), ("b", "f", ARGUMENTS)]
    turned = [{**second, "id": "b"}, {**first, "id": "a"}]
    assert chat(*two, whole("tool_calls", tool_calls=turned)).calls == [("a", "f", "{}"), ("b", "f", ARGUMENTS)]


@pytest.mark.parametrize(
    "last", [chunk("stop"), {**chunk(), "choices": [{"index": 0, "delta": None, "finish_reason": "stop"}]}]
)
def test_a_last_chunk_whose_delta_is_null_is_an_end(last: dict[str, Any]) -> None:
    result = chat(chunk(content="ha"), chunk(content="ha"), last)
    assert (result.text, result.terminal) == ("haha", Done("stop", "stop"))


def test_a_call_repeated_after_its_end_is_emitted_once() -> None:
    result = chat(*argued(ARGUMENTS[:4], ARGUMENTS[4:]), chunk("tool_calls", tool_calls=[CALL]))
    assert (result.calls, result.done_calls) == ([("c", "f", ARGUMENTS)], 1)
    old = {"name": "f", "arguments": ARGUMENTS}
    both = chat(chunk(tool_calls=[CALL], function_call=old), chunk("tool_calls", function_call=old))
    assert both.calls == [("c", "f", ARGUMENTS)]


def thinks(piece: str, **more: Any) -> dict[str, Any]:
    return chunk(reasoning_content=piece, **more)


@pytest.mark.parametrize("quirks", [Quirks(), Quirks(inline_thinking=("think",))])
@pytest.mark.parametrize(
    "events",
    [
        [thinks("H"), thinks("m."), chunk(content="<think>Hm.</think>"), chunk(content="Hi")],
        [thinks("H", content="<thi"), thinks("m.", content="nk>Hm.</th"), chunk(content="ink>Hi")],
        [thinks("Hm.", content="\n<think>\nHm.\n</think>Hi")],
        [thinks("Hm.", reasoning="Hm."), whole(content="<think>Hm.</think>Hi", reasoning_content="Hm.")],
        [whole(content="<think>Hm.</think>Hi", reasoning_content="Hm.")],
    ],
)
def test_thinking_in_its_field_and_between_tags_is_emitted_once(events: list[Any], quirks: Quirks) -> None:
    result = answer(read("openai-chat", sse(*events, chunk("stop"), DONE), quirks=quirks))
    assert (result.thinking, result.text, result.open) == ("Hm.", "Hi", set())


@pytest.mark.parametrize(
    "late",
    [
        [thinks("H"), thinks("m."), chunk(content="Hi")],
        [chunk(content="Hi"), thinks("H"), thinks("m.")],
        [chunk(content="Hi"), whole(content="<think>Hm.</think>Hi", reasoning_content="Hm.")],
    ],
)
def test_thinking_in_both_text_and_field_is_emitted_once(late: list[Any]) -> None:
    quirks = Quirks(inline_thinking=("think",))
    events = [chunk(content="<think>H"), chunk(content="m.</think>"), *late, chunk("stop"), DONE]
    result = answer(read("openai-chat", sse(*events), quirks=quirks))
    assert (result.thinking, result.text) == ("Hm.", "Hi")


def test_tags_with_another_text_are_what_they_were() -> None:
    result = chat(chunk(reasoning_content="Hm."), chunk(content="<think>No.</think>Hi"), chunk("stop"))
    assert (result.thinking, result.text) == ("Hm.", "<think>No.</think>Hi")
    open_tag = chat(chunk(reasoning_content="Hm."), chunk(content="<think>Hm."), chunk("stop"))
    assert (open_tag.thinking, open_tag.text) == ("Hm.", "<think>Hm.")
    cut = said_by("openai-chat", chunk(reasoning_content="Hm."), chunk(content="<thi"))
    assert (cut.text, isinstance(cut.terminal, Cut)) == ("<thi", True)


def test_calls_of_chat_completions_complete_in_the_order_of_other_providers() -> None:
    """The first is complete when the second begins, if its arguments are whole."""
    two = sse(*argued("{}"), *argued(ARGUMENTS, index=1, tool_id="d"), chunk("tool_calls"), DONE)
    order = [type(e).__name__ for e in read("openai-chat", two) if isinstance(e, ToolCallStart | ToolCallDone)]
    assert order == ["ToolCallStart", "ToolCallDone"] * 2
    first, *rest = argued(ARGUMENTS[:5])
    mixed = sse(
        first, *argued("{}", index=1, tool_id="d"), *rest, *argued(ARGUMENTS[5:])[1:], chunk("tool_calls"), DONE
    )
    result = answer(read("openai-chat", mixed))
    assert result.calls == [("c", "f", ARGUMENTS), ("d", "f", "{}")]
    assert result.done_calls == 2
    late = said_by("openai-chat", *argued("{}"), *argued("{}", index=1, tool_id="d"), *argued('{"x":1}')[1:])
    assert isinstance(late.terminal, Failed)


def test_a_repeated_image_is_emitted_once() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    result = chat(chunk(images=[image]), chunk(images=[image]), whole(content="Hi", images=[image]))
    assert result.kinds == ["image", "text"]


# --- Anthropic and its dialects -----------------------------------------------------------------------------------


def begun(*content: Any, **message: Any) -> dict[str, Any]:
    return {"type": "message_start", "message": {"id": "msg", "model": "m", "content": [*content], **message}}


def starts(index: int, **block: Any) -> dict[str, Any]:
    return {"type": "content_block_start", "index": index, "content_block": block}


def grows(index: int, *pieces: str, kind: str = "text") -> list[dict[str, Any]]:
    deltas = ({"type": f"{kind}_delta", kind: piece} for piece in pieces)
    return [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]


def stops(index: int) -> dict[str, Any]:
    return {"type": "content_block_stop", "index": index}


def messages(*events: Any, reason: str = "end_turn") -> Answer:
    end = [{"type": "message_delta", "delta": {"stop_reason": reason}}, {"type": "message_stop"}]
    return said_by("anthropic", *events, *end)


@pytest.mark.parametrize("kind", ["text", "thinking"])
@pytest.mark.parametrize("first", ["", "ha", "ha ha"])
@pytest.mark.parametrize("pieces", [HA, ("ha ha",), ("h", "a ha"), ("ha h", "a")])
def test_what_a_block_begins_with_may_be_its_first_delta_too(kind: str, first: str, pieces: tuple[str, ...]) -> None:
    result = messages(begun(), starts(0, type=kind, **{kind: first}), *grows(0, *pieces, kind=kind), stops(0))
    assert (result.text + result.thinking, result.kinds, result.open) == ("ha ha", [kind], set())


def test_what_a_block_begins_with_and_no_delta_repeats_is_its_beginning() -> None:
    for pieces, text in (
        (("lo",), "Hello"),
        (("He",), "HelHe"),
        (("Help",), "Help"),
        ((), "Hel"),
        (("H", "a"), "HelHa"),
    ):
        assert messages(begun(), starts(0, type="text", text="Hel"), *grows(0, *pieces), stops(0)).text == text


LAST = {"type": "message", "id": "msg", "model": "m", "stop_reason": "end_turn"}
DELTA = {"type": "content_block_delta"}
CONTENT = [
    {"type": "thinking", "thinking": "Hm", "signature": "s"},
    {"type": "text", "text": "ha ha"},
    {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"q": "x"}},
]
STREAMED = [
    starts(0, type="thinking", thinking="", signature=""),
    *grows(0, "H", "m", kind="thinking"),
    {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "s"}},
    stops(0),
    starts(1, type="text", text=""),
    *grows(1, *HA),
    stops(1),
    starts(2, **{**CONTENT[2], "input": {}}),
    {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": '{"a": '}},
    {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": "1}"}},
    stops(2),
    starts(3, **CONTENT[3]),
    stops(3),
]


@pytest.mark.parametrize("many", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("end", [[], [{**begun(*CONTENT)["message"], "type": "message", "stop_reason": "tool_use"}]])
def test_content_in_message_start_and_then_the_blocks_is_emitted_once(many: int, end: list[Any]) -> None:
    arguments = messages(begun(*CONTENT[:many]), *STREAMED, *end, reason="tool_use")
    assert (arguments.thinking, arguments.text) == ("Hm", "ha ha")
    assert [(name, arguments.replace(" ", "")) for _, name, arguments in arguments.calls] == [("f", '{"a":1}')]
    assert arguments.kinds == ["thinking", "text", "tool_call", "anthropic.server_tool_use"]
    assert (arguments.done_calls, arguments.open, arguments.terminal) == (1, set(), Done("tool_use", "tool_use"))


def test_content_of_message_start_continues_in_its_block_or_is_a_block_beside_others() -> None:
    start = begun({"type": "text", "text": "Hello"})
    assert messages(start, starts(0, type="text", text=""), *grows(0, " you"), stops(0)).text == "Hello you"
    beside = messages(start, starts(1, type="text", text=""), *grows(1, "Hello"), stops(1))
    assert (beside.text, beside.kinds) == ("HelloHello", ["text", "text"])
    other = messages(start, starts(0, type="thinking", thinking=""), *grows(0, "Hm", kind="thinking"), stops(0))
    assert (other.text, other.thinking, other.open) == ("Hello", "Hm", set())


def test_a_whole_message_at_the_end_says_what_the_stream_did_not() -> None:
    last = {
        "type": "message",
        "id": "other",
        "content": [*CONTENT, {"type": "text", "text": "!"}],
        "stop_reason": "end_turn",
    }
    result = messages(begun(), *STREAMED[:8], last)
    assert (result.text, result.kinds[-2:]) == ("ha ha!", ["anthropic.server_tool_use", "text"])
    assert result.done_calls == 1


def test_a_call_that_the_whole_message_lacks_stays_incomplete() -> None:
    said = messages(begun(), starts(0, type="tool_use", id="t", name="f", input={}), {**LAST, "content": CONTENT[1:2]})
    assert (said.text, said.done_calls, said.open, said.terminal) == ("ha ha", 0, {0}, Done("stop", "end_turn"))


def test_calls_without_ids_take_the_rest_of_their_own_input_from_the_whole_message() -> None:
    def call(text: str, index: int) -> list[Any]:
        delta = {"type": "input_json_delta", "partial_json": text}
        return [starts(index, type="tool_use", id="", name="f", input={}), {**DELTA, "index": index, "delta": delta}]

    content = [{"type": "tool_use", "id": "", "name": "f", "input": {"a": a}} for a in (1, 2)]
    for second, left in (('{"a":2', set[int]()), ('{"a":3', {1})):
        said = messages(begun(), *call('{"a":1}', 0), stops(0), *call(second, 1), {**LAST, "content": content})
        done = [arguments for place, (*_, arguments) in enumerate(said.calls) if place not in left]
        assert (done, said.open) == (['{"a":1}', '{"a":2}'], left)
    whole = said_by("anthropic", {**LAST, "content": content, "stop_reason": "tool_use"})
    assert [arguments for *_, arguments in whole.calls] == ['{"a":1}', '{"a":2}']


# --- Gemini -------------------------------------------------------------------------------------------------------


def gemini(*parts: Any) -> Answer:
    chunks = [{"candidates": [{"content": {"parts": [part]}}], "modelVersion": "m"} for part in parts]
    return said_by("gemini", *chunks, {"candidates": [{"finishReason": "STOP"}]})


def test_a_call_and_an_image_that_gemini_repeats_are_emitted_once() -> None:
    call = {"functionCall": {"id": "c", "name": "f", "args": {"a": 1}}}
    assert gemini(call, call).calls == [("c", "f", '{"a":1}')]
    other = {"functionCall": {"id": "c", "name": "f", "args": {"a": 2}}}
    assert gemini(call, other).done_calls == 2
    nameless = {"functionCall": {"name": "f", "args": {"a": 1}}}
    assert gemini(nameless, nameless).done_calls == 2, "two calls may be the same"
    piece = {"jsonPath": "$.a", "numberValue": 1}
    first = {"id": "c", "name": "f", "partialArgs": [piece], "willContinue": True}
    pieces = [{"functionCall": first}, {"functionCall": {"name": "f", "partialArgs": []}}]
    assert gemini(*pieces, call).calls == [("c", "f", '{"a":1}')]
    image = {"inlineData": {"mimeType": "image/png", "data": "AAAA"}}
    assert gemini(image, image, {"text": "a"}, image).kinds == ["image", "text"]
    assert gemini({**image, "thought": True}, image).kinds == ["image", "image"]
    assert gemini({"text": "ha"}, {"text": "ha"}).text == "haha"
