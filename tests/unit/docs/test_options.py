"""Every option of each built-in policy and of each kind of tool has its row and an example that loads."""

from __future__ import annotations

import json
import os
import re
import tomllib
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from tests.rows import over_rows
from tests.unit.docs.pages import page, quoted, rows
from tests.unit.policy.streams import call, calls, chunk, chunk_stream, text, under
from tests.unit.policy.test_chain import contents
from tokenbus import policy as api
from tokenbus.policy import ReplaceText, StreamProcessor
from tokenbus.policy.loading import PolicySpec, load
from tokenbus_services.policy_stage import builtin
from tokenbus_services.settings.tables.workers import ClientTool, HttpTool, McpHttp, McpStdio, PythonTool

TEXT = page("guides/policies.md")
SECTIONS = dict(re.findall(r"(?ms)^### (.+?)$(.*?)(?=^###? |\Z)", TEXT))
POLICIES: dict[str, type[StreamProcessor]] = {
    name: kind
    for module in (api, builtin)
    for name in module.__all__
    if isinstance(kind := getattr(module, name), type)
    and issubclass(kind, StreamProcessor)
    and msgspec.structs.fields(kind.Options)
}
DECLARED: dict[str, type[msgspec.Struct]] = {
    **{name: kind.Options for name, kind in POLICIES.items()},
    "Rules of a replacement": api.Rule,
}


def examples(name: str) -> list[dict[str, Any]]:
    return [tomllib.loads(code) for code in re.findall(r"```toml\n(.*?)```", page(name), re.DOTALL)]


TABLES: dict[str, dict[str, Any]] = {
    table["use"].partition(":")[2]: table
    for example in examples("guides/policies.md")
    for table in example.get("policies", {}).values()
}


def defaults_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in msgspec.structs.fields(kind):
        value = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        found[field.encode_name] = "required" if field.required else json.loads(msgspec.json.encode(value))
    return found


@over_rows("name", DECLARED)
def test_each_option_of_a_built_in_policy_has_its_row_and_its_default(name: str) -> None:
    documented: dict[str, Any] = {}
    for option, default, what in rows(SECTIONS[name]):
        assert what, option
        plain = {"required": "required", "none": None}
        documented[quoted(option)] = plain[default] if default in plain else json.loads(quoted(default))
    assert documented == defaults_of(DECLARED[name])


def test_the_examples_of_the_policies_use_every_option() -> None:
    used = {name: set(table["options"]) for name, table in TABLES.items()}
    assert used == {name: set(defaults_of(kind.Options)) for name, kind in POLICIES.items()}
    options = [table["options"] for table in TABLES.values()]
    ruled = [
        rule for each in options for key in ("rules", "more") if isinstance(each.get(key), list) for rule in each[key]
    ]
    assert {key for rule in ruled for key in rule} == set(defaults_of(api.Rule))


@pytest.mark.parametrize(
    ("name", "chunks", "left"),
    [
        (
            "ToolRules",
            [calls(call(0, "{}", call_id="a", name="shell_read")), calls(call(1, "{}", call_id="b", name="get_it"))],
            "shell_read is not allowed here.get_it",
        ),
        ("ArgumentSchemas", [calls(call(0, "{}", call_id="a", name="get_weather"))], "get_weather needs a city."),
        ("ReplaceText", [text("Colour, colours, ACME-12345")], "color, colours, [order]"),
        ("RedactSecrets", [text("hunter2hunter2 and tok-0123456789abcdef.")], "*** and ***."),
    ],
)
async def test_the_example_of_a_policy_does_what_its_page_says(
    name: str, chunks: list[dict[str, Any]], left: str
) -> None:
    with patch.dict(os.environ, DATABASE_PASSWORD="hunter2hunter2"):
        made = load(PolicySpec(policy=TABLES[name]["use"], options=TABLES[name]["options"]))().policy
        out = await under(chunk_stream(made), [*chunks, chunk(finish="stop")])
    assert "".join(contents(out)) == left


def test_the_example_of_the_judge_loads() -> None:
    table = TABLES["CallJudge"]
    made = load(PolicySpec(policy=table["use"], options=table["options"]))().policy
    assert msgspec.to_builtins(made.options) == table["options"]


@over_rows("kind", [PythonTool, HttpTool, ClientTool, McpStdio, McpHttp])
def test_the_examples_of_the_tools_use_every_option(kind: type[msgspec.Struct]) -> None:
    group = "mcp" if kind in (McpStdio, McpHttp) else "tools"
    tables = [
        table
        for page in ("tools", "waiting")
        for example in examples(f"guides/{page}.md")
        for table in example.get(group, {}).values()
    ]
    used = {key for table in tables if table["kind"] == kind.__struct_config__.tag for key in table}
    assert used == {field.encode_name for field in msgspec.structs.fields(kind)} | {"kind"}


def test_the_policies_found_are_those_of_the_page() -> None:
    assert set(SECTIONS) == set(DECLARED)
    assert ReplaceText in POLICIES.values()
