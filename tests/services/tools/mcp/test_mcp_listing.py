"""Models get a server's listed tools only if they are valid."""

from __future__ import annotations

import mcp_types as types

from tokenbus_services.tools.mcp.server import MAX_DESCRIPTION_CHARS, MAX_TOOLS, usable

OBJECT = {"type": "object"}


def tool(name: str, schema: dict[str, object] | None = None, **fields: str) -> types.Tool:
    return types.Tool(name=name, input_schema=schema or OBJECT, **fields)  # type: ignore[arg-type]


def test_a_name_is_made_valid_for_providers() -> None:
    found = usable("s", "s__", [tool("files/read.all")])
    assert {name: listed.remote_name for name, listed in found.items()} == {"s__files_read_all": "files/read.all"}


def test_of_two_tools_with_one_name_the_first_stays() -> None:
    found = usable("s", "s__", [tool("a.b"), tool("a/b")])
    assert [listed.remote_name for listed in found.values()] == ["a.b"]


def test_a_name_that_is_too_long_is_left_out() -> None:
    assert usable("s", "s__", [tool("x" * 62), tool("y" * 61)]).keys() == {"s__" + "y" * 61}


def test_a_schema_that_calls_cannot_be_checked_against_is_left_out() -> None:
    found = usable("s", "", [tool("bad", {"type": "nothing"}), tool("far", {"$ref": "http://x/y"}), tool("good")])
    assert found.keys() == {"good"}


def test_the_number_of_tools_and_their_descriptions_are_bounded() -> None:
    found = usable("s", "", (tool(f"t{n}", description="d" * 10_000) for n in range(2 * MAX_TOOLS)))
    assert len(found) <= MAX_TOOLS
    assert {len(listed.definition.description or "") for listed in found.values()} == {MAX_DESCRIPTION_CHARS}


def test_definitions_together_are_bounded() -> None:
    large: dict[str, object] = {"type": "object", "description": "d" * 200_000}
    assert len(usable("s", "", [tool(f"t{n}", large) for n in range(20)])) == 5
