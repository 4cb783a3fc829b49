"""Declared tools are resolved at start, and a wrong one is named with its cause."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tokenbus.errors import SettingsError
from tokenbus_services.settings import HttpTool, PythonTool, ToolSettings
from tokenbus_services.tools.executor import ToolOutcome, ToolRegistry

from .conftest import SAMPLES, MakeExecutor, call


def declare(name: str, tool: ToolSettings, env: dict[str, str] | None = None) -> ToolRegistry:
    return ToolRegistry({name: tool}, env=env or {}, source="tokenbus.toml")


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("", "not of the form module:function"),
        ("greet", "not of the form module:function"),
        (":greet", "not of the form module:function"),
        (f"{SAMPLES}:", "not of the form module:function"),
        ("no_such_module:f", "cannot be imported: ModuleNotFoundError"),
        (f"{SAMPLES}:nobody", "has no 'nobody'"),
        (f"{SAMPLES}:Counter.nobody", "has no 'Counter.nobody'"),
        (f"{SAMPLES}:not_callable", "is not callable: it is of type int"),
        (f"{SAMPLES}:positional", "'value' cannot be passed by name"),
    ],
)
def test_a_callable_that_cannot_be_found_or_called_is_named(path: str, problem: str) -> None:
    with pytest.raises(SettingsError, match=problem) as refused:
        declare("weather", PythonTool(call=path))
    assert (refused.value.source, refused.value.where) == ("tokenbus.toml", "tools.weather.call")


@pytest.mark.parametrize("line", ["1 / 0", "raise SystemExit(3)", "import no_such_module", "def"])
def test_a_module_that_breaks_on_import_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    (tmp_path / "broken_tools.py").write_text(line)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SettingsError, match="module 'broken_tools' cannot be imported: "):
        declare("weather", PythonTool(call="broken_tools:f"))
    assert "broken_tools" not in sys.modules


@pytest.mark.parametrize(
    ("tool", "problem"),
    [
        (HttpTool(url="localhost:80/x"), "url: must start with http"),
        (HttpTool(url="ftp://host/x"), "url: must start with http"),
        (HttpTool(url="http:///x"), "url: must start with http"),
        (HttpTool(url="http://host:port/"), "url: "),
        (HttpTool(url="http://h", header_env={"Authorization": "NOT_SET"}), "the environment has no NOT_SET"),
        (
            HttpTool(url="http://h", header_env={"Authorization": "BROKEN"}),
            "header_env.Authorization: BROKEN: contains",
        ),
        (HttpTool(url="http://h", headers={"X": "a\r\nY: b"}), "header X: the value contains"),
        (HttpTool(url="http://h", headers={"X\r\nY": "b"}), "is not a valid header name"),
        (HttpTool(url="http://h", headers={"": "b"}), "is not a valid header name"),
    ],
)
def test_an_endpoint_that_cannot_be_called_is_named_and_no_secret_shown(tool: HttpTool, problem: str) -> None:
    with pytest.raises(SettingsError, match=problem) as refused:
        declare("weather", tool, {"BROKEN": "s3\ncret"})
    assert refused.value.where == "tools.weather"
    assert "s3cret" not in str(refused.value)


def test_a_schema_that_is_none_is_named() -> None:
    with pytest.raises(SettingsError, match="not a JSON schema") as refused:
        declare("weather", PythonTool(call=f"{SAMPLES}:echo", parameters={"type": "objekt"}))
    assert refused.value.where == "tools.weather.parameters"


@pytest.mark.parametrize("name", ["", "with blank", "wetter-größe", "a.b", "x" * 65])
def test_a_name_that_providers_do_not_take_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match="a tool name must"):
        declare(name, PythonTool(call=f"{SAMPLES}:echo"))


@pytest.mark.parametrize(
    ("path", "arguments", "content"),
    [
        ("counter.add", '{"by": 0}', "0"),
        ("counter", '{"by": 0}', "0"),
        ("partial_greet", '{"name": "Ada"}', "Ahoy, Ada"),
        ("wrapped", '{"name": "Ada"}', "Later, Ada"),
        ("optional_positional", "{}", "7"),
    ],
)
async def test_all_kinds_of_callables_are_tools(
    make_executor: MakeExecutor, path: str, arguments: str, content: str
) -> None:
    executor = make_executor({"t": PythonTool(call=f"{SAMPLES}:{path}")})
    assert await executor.execute(call("t", arguments)) == ToolOutcome(content)


async def test_a_callable_without_a_known_signature_is_a_tool(make_executor: MakeExecutor) -> None:
    executor = make_executor({"t": PythonTool(call="builtins:dict")})
    assert await executor.execute(call("t", '{"a": 1}')) == ToolOutcome('{"a":1}')
