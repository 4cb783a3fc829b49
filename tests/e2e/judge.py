"""Judges a run's log by design.md alone: knows the JSON, and nothing of the code that wrote it."""

from __future__ import annotations

from typing import Any

TERMINAL = ("completed", "incomplete", "failed", "cancelled")
Log = list[dict[str, Any]]


def check(log: Log) -> None:
    """Gapless, in order, every block whole, exactly one end and nothing after it."""
    assert [e["seq"] for e in log] == list(range(len(log))), "seq has a gap or a double"
    assert len({e["run"] for e in log}) == 1
    positions = [(e["turn"], e["attempt"]) for e in log]
    assert positions == sorted(positions), "turns and attempts never go back"
    ends = [i for i, e in enumerate(log) if e["type"] in TERMINAL]
    assert ends == [len(log) - 1], f"terminal events at {ends} of {len(log)}"
    _check_blocks(log)


def check_tree(order: list[tuple[str, str]], logs: dict[str, Log]) -> None:
    """The order names each event of the tree's runs once, and a child's between the beginning and the end of its call.

    ``order``: run and value of each entry. ``logs``: those of all runs of the tree, each whole.
    """
    placed: list[dict[str, Any]] = []
    begun: set[str] = set()
    for run, value in order:
        first, last, *blocks = value.split(" ")
        begin = int(first.rpartition("-")[2])
        placed += logs[run][begin : int(last) + 1]
        begun |= {f"{run}~{block}" for block in blocks}
    assert {event["run"] for event in placed} == logs.keys()
    assert logs.keys() - begun == {run for run in logs if "~" not in run}
    for run, log in logs.items():
        assert [event for event in placed if event["run"] == run] == log, f"{run} is not whole, or not in its order"
    for run in begun & logs.keys():
        places = [n for n, event in enumerate(placed) if event["run"] == run]
        for n, event in enumerate(placed):
            if event.get("child") == run:
                assert n < places[0] if event["type"] == "child_started" else n > places[-1]


def _check_blocks(log: Log) -> None:
    written: dict[int, str] = {}
    done: set[int] = set()
    answered: set[str] = set()
    of_input = "judges_input_of" in (log[0].get("metadata") or {})
    """It is what a client said, which no model has said yet."""
    commentary = {event["block"] for event in log if event.get("phase") == "commentary"}
    for event in log:
        number: int = event.get("block", -1)
        match event["type"]:
            case "block_start":
                assert number == len(written), "blocks are numbered without a gap"
                written[number] = ""
                if event["kind"] == "tool_result":
                    answered.add(event["tool_id"])
            case "chunk":
                assert number in written
                assert number not in done
                if number not in commentary:  # the request decides
                    assert event["visible"] == (event["kind"] in ("text", "audio") and not of_input)
                if event.get("tool_call_part") in (None, "input"):
                    written[number] += event["text"]
            case "image_preview" | "block_progress":
                assert number in written
                assert number not in done
            case "tool_progress":
                assert number in done, "a call makes progress once it is whole"
                assert event["tool_id"] not in answered, "and until its result"
            case "block_complete":
                assert number in written
                assert number not in done
                done.add(number)
                assert written[number] == _whole(event), "chunks concatenate to exactly the content"
            case _:
                pass
    assert done == set(written), "every block that starts completes"


def _whole(event: dict[str, Any]) -> str:
    """The content that the block's chunks were; an image has none."""
    match event["kind"]:
        case "tool_call":
            return event["arguments"]
        case "image":
            return ""
        case _:
            return event["content"]


def blocks(log: Log) -> list[tuple[str, str]]:
    """The run's blocks that count, each as its kind and its whole content: what attempts that failed wrote is void."""
    kept: dict[int, tuple[str, str]] = {}
    for event in log:
        if event["type"] in ("retrying", "restarted"):
            kept = {n: block for n, block in kept.items() if n < event["drop_from"]}
        elif event["type"] == "block_complete":
            kept[event["block"]] = (event["kind"], _whole(event))
    return [kept[n] for n in sorted(kept)]


def text(log: Log) -> str:
    """The events that a listener received, in order."""
    return "".join(e["text"] for e in log if e["type"] == "chunk" and e["visible"])


PASSING = ("run", "seq", "timing", "provider_id")
"""Fields that differ between two runs of the same request."""


def without_timing(log: Log) -> Log:
    """The log without what depends on time and on the run's name: how the text was cut into chunks, above all."""
    events: Log = []
    for event in log:
        kept = {name: value for name, value in event.items() if name not in PASSING and not name.endswith("_ms")}
        before = events[-1] if events else {}
        if event["type"] == "chunk" and {**before, "text": ""} == {**kept, "text": ""}:
            before["text"] += kept["text"]
        else:
            events.append(kept)
    return events
