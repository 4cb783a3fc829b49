"""Each run against its story: it ended as its policy allows, and its content is that of the undisturbed run.

The content of a run that did not complete must be a prefix of that.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from tests.chaos.record import Piece, Record, Story, Violation
from tests.e2e.judge import TERMINAL, Log

RESULTS = "{tool_result}"
"""Placeholder in a piece for the results of the previous turn."""
LOST_BY_THE_SERVER = {"server_lost_writes", "frames_lost", "lost"}
"""Errors of a run whose writes an asynchronous fail-over has lost."""
UNJUDGED = "policy_silent"
"""Error of a run whose drafts, or the verdicts on them, were lost in this way."""
TERMINATED = "policy_terminated"
"""The error of a run that a policy ended."""
TOO_LARGE = {"poison", "request_too_large", "too_large"}
"""Errors of a request that no worker should hold."""
_BEGUN_TAG = re.compile(r"\n?</?[a-z_]*$")


def judge(record: Record) -> Iterator[Violation]:
    """Check outcome and content of every run that ended."""
    for story in record.stories:
        log = [entry.event for entry in record.logs.get(story.run, ())]
        if not log or log[-1]["type"] not in TERMINAL:
            continue  # reported by the rules of logs
        if story.fate == "hostile":
            if log[-1]["type"] in ("cancelled", "completed") or not log[-1].get("error", {}).get("code"):
                yield Violation("outcome", story.run, f"hostile: {log[-1]['type']}: {log[-1].get('error')}")
            continue
        if story.fate == "huge":
            if log[-1]["type"] != "failed" or log[-1]["error"]["code"] not in TOO_LARGE:
                yield Violation("outcome", story.run, f"huge: {log[-1]['type']}: {log[-1].get('error')}")
            continue
        if problem := _outcome(story, log, lossy=record.lossy):
            yield Violation("outcome", story.run, f"{story.fate}, {story.on_failure}: {problem}")
        if problem := _content(story, log):
            yield Violation("content", story.run, problem)


def kept(log: Log) -> list[dict[str, Any]]:
    """The `block_complete` of each block that counts: the blocks of failed attempts are void."""
    blocks: dict[int, dict[str, Any]] = {}
    for event in log:
        if event["type"] in ("retrying", "restarted"):
            blocks = {n: block for n, block in blocks.items() if n < event["drop_from"]}
        elif event["type"] == "block_complete":
            blocks[event["block"]] = event
    return [blocks[n] for n in sorted(blocks)]


def _outcome(story: Story, log: Log, *, lossy: bool) -> str | None:
    """What is wrong with how the run ended."""
    end = log[-1]
    how, error = end["type"], end.get("error", {})
    again = [e for e in log if e["type"] in ("retrying", "restarted")]
    if story.on_failure == "fail" and again:
        return f"tried again: {again[0]}"
    if story.on_failure != "restart" and any(e["type"] == "restarted" for e in log):
        return "restarted, though its request does not allow it"
    for event in again:
        if event.get("continues"):
            if story.on_failure != "continue":
                return f"continued, though its request does not allow it: {event}"
        elif (event["type"] == "restarted") != _has_visible_output(log[: event["seq"]], event) and not (
            story.guarded and event["type"] == "restarted"  # it depends on the model's output, which is more than what
            # policies released
        ):
            return f"{event['type']} contradicts what was published: {event}"
    if how == "completed":
        if story.guarded and story.guarded.stopped:
            return "completed, though a policy ends it"
        return "completed, though the provider never ended" if story.fate == "deadline" else None
    if how == "cancelled":
        return None if story.fate == "cancelled" else "cancelled, though no client asked for it"
    if story.fate == "deadline" and error.get("code") == "deadline":
        return None
    if lossy and how == "incomplete" and error.get("code") in LOST_BY_THE_SERVER:
        return None
    if error.get("code") == UNJUDGED:
        return None if lossy and story.guarded else "no policy worker judged it"
    if error.get("code") == TERMINATED:
        due = story.guarded and story.guarded.stopped and (how, end["finish"]) == ("incomplete", "content_filter")
        return None if due else f"{how}, {end['finish']}, by a policy: {error}"
    if not error.get("retryable"):
        return f"{how} by an error that is not retryable: {error}"
    if story.on_failure == "fail":
        return None
    if story.on_failure == "restart" or (story.on_failure, story.mode) == ("continue", "prefill"):
        return f"{how} instead of another attempt: {error}"
    return None if _has_visible_output(log, end) or story.guarded else f"{how}, though nothing was published: {error}"


def _has_visible_output(log: Log, end: dict[str, Any]) -> bool:
    """Whether the current turn has visible output that is not void."""
    visible = False
    for event in log:
        if event["type"] in ("retrying", "restarted") and not event.get("continues"):
            visible = False
        elif event["type"] == "chunk" and event["visible"] and event["turn"] == end["turn"]:
            visible = True
    return visible


def _content(story: Story, log: Log) -> str | None:
    """What is wrong with the content of the run."""
    blocks = kept(log)
    results: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for block in blocks:
        if block["kind"] == "tool_result":
            results[block["turn"]].append(block)
    model_blocks = [block for block in blocks if block["kind"] != "tool_result"]
    if len(model_blocks) > len(story.pieces):
        return f"{len(model_blocks)} blocks, and the model wrote {len(story.pieces)}"
    for block, piece in zip(model_blocks, story.pieces, strict=False):
        if problem := _piece(story, block, piece, results[piece.turn - 1]):
            return f"block {block['block']}: {problem}"
    if log[-1]["type"] == "completed":
        if len(model_blocks) < len(story.pieces):
            return f"completed with {len(model_blocks)} of {len(story.pieces)} blocks"
        if any(block.get("cut") for block in blocks):
            return "completed with a block that was cut"
    return None


def _piece(story: Story, block: dict[str, Any], piece: Piece, results: list[dict[str, Any]]) -> str | None:
    if (block["kind"], block["turn"]) != (piece.kind, piece.turn):
        return f"a {block['kind']} of turn {block['turn']}; the model wrote a {piece.kind} of turn {piece.turn}"
    got = block["arguments"] if piece.kind == "tool_call" else block["content"]
    if RESULTS in piece.whole and any(r.get("is_error") for r in results):
        return None  # how a provider receives an error depends on its API
    if RESULTS in piece.whole and (reasons := _reasons(story, piece.turn - 1)):
        return _among(got, piece, [*reasons, *(r["content"] for r in results)], cut=bool(block.get("cut")))
    whole = piece.whole.replace(RESULTS, " ".join(r["content"] for r in results))
    if block.get("cut") and story.mode == "prefill":
        got = _BEGUN_TAG.sub("", got)  # the parser releases an incomplete tag as text at the end
    right = whole.startswith(got) if block.get("cut") else whole == got
    return None if right else f"{got!r}, and the model wrote {whole!r}"


def _reasons(story: Story, turn: int) -> list[str]:
    """What the model reads in place of the results of the calls of this turn that policies blocked."""
    guarded = story.guarded
    return [guarded.reason for piece in guarded.blocked if piece.turn == turn] if guarded else []


def _among(got: str, piece: Piece, results: list[str], *, cut: bool) -> str | None:
    """What is wrong with a text that quotes results, errors among them. The form in which a provider receives these
    depends on its API, so they must appear in any form.
    """
    begin, end = piece.whole.split(RESULTS)
    if cut:
        return None if begin.startswith(got[: len(begin)]) else f"{got!r}, and the model wrote {begin!r}"
    if not (got.startswith(begin) and got.endswith(end)):
        return f"{got!r}, and the model wrote {piece.whole!r}"
    missing = [result for result in results if result not in got]
    return f"the model never read {missing}" if missing else None
