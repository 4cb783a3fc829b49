"""Bytes from outside may be no text, or nested too deeply.

msgspec raises UnicodeDecodeError and RecursionError then, which are no DecodeError: a handler of that alone lets them
out, and one value stops more than it should.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenbus.blob_wire import blob_error
from tokenbus.client.decode import public_event
from tokenbus.errors import BlobUnavailable, Malformed

ROOT = Path(__file__).parents[2] / "shared" / "tokenbus"
OF_MSGSPEC = {"DecodeError", "MsgspecError"}
OF_TEXT = {"UnicodeDecodeError", "UnicodeError", "UnicodeEncodeError", "ValueError", "Exception"}
OF_DEPTH = {"RecursionError", "Exception"}

IS_TEXT = "it decodes a str"
CHECKED = "the response decoder has checked that the event is UTF-8 (`_check_text`)"
ITS_FRAME = "what gets out is the error of its frame, as the one that it would raise is"

READS_TEXT_ALONE = {
    "client/response.py:parsed": IS_TEXT,
    "core/prefill/calls.py:_misread": IS_TEXT,
    "events/frames.py:_known": ITS_FRAME,
    "providers/openai_responses/items.py:tools_of": CHECKED,
    "providers/response/json_decode.py:read": CHECKED,
    "providers/response/json_decode.py:tag_of": CHECKED,
}
READS_WHAT_IS_FLAT = {"events/frames.py:_known": ITS_FRAME}


def names_of(handler: ast.ExceptHandler) -> set[str]:
    """The last parts of the names of the exceptions that it catches."""
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return {each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "") for each in types}


def decoding_in(source: str) -> Iterator[tuple[str, set[str]]]:
    """The function of each `try` that handles msgspec's errors, and all exceptions that it handles."""

    def walk(node: ast.AST, function: str) -> Iterator[tuple[str, set[str]]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Try):
                caught = set[str]().union(*(names_of(handler) for handler in child.handlers))
                if caught & OF_MSGSPEC:
                    yield function, caught
            named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from walk(child, child.name if named else function)

    yield from walk(ast.parse(source), "")


def test_what_handles_the_errors_of_a_decoder_handles_all_of_them() -> None:
    found = [
        (f"{file.relative_to(ROOT).as_posix()}:{function}", caught)
        for file in sorted(ROOT.rglob("*.py"))
        if any(name in (source := file.read_text()) for name in OF_MSGSPEC)
        for function, caught in decoding_in(source)
    ]
    assert len(found) > 20
    assert {place for place, caught in found if not caught & OF_TEXT} == set(READS_TEXT_ALONE)
    assert {place for place, caught in found if not caught & OF_DEPTH} == set(READS_WHAT_IS_FLAT)


def test_a_handler_is_found_wherever_it_is() -> None:
    source = "def a():\n try: x()\n except (KeyError, m.DecodeError): pass\n except RecursionError: pass"
    assert [*decoding_in(source)] == [("a", {"KeyError", "DecodeError", "RecursionError"})]


NO_JSON = {
    "no text": b'{"code":"\xff","type":"\xff"}',
    "nested deeper than a decoder goes": b'{"more":' + b"[" * 10_000,
    "cut": b'{"code":',
}


@pytest.mark.parametrize("data", NO_JSON.values(), ids=NO_JSON)
def test_an_entry_that_is_no_json_is_a_malformed_event(data: bytes) -> None:
    with pytest.raises(Malformed, match="log 1-0"):
        public_event("log", (b"1-0", {b"__data__": data}))


@pytest.mark.parametrize("data", NO_JSON.values(), ids=NO_JSON)
def test_an_answer_that_is_no_json_is_not_of_a_blob_service(data: bytes) -> None:
    assert isinstance(blob_error(500, data, "blob"), BlobUnavailable)
