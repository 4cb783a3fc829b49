"""Errors in the settings of MCP servers are reported before anything starts."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import pytest

from tokenbus.errors import SettingsError
from tokenbus_services.settings import McpHttp, McpSettings, McpStdio
from tokenbus_services.tools.executor import ToolRegistry


@pytest.mark.parametrize(
    ("servers", "where", "problem"),
    [
        ({"a b": McpStdio(command="x")}, "mcp.a b", "1 to 32 letters"),
        ({"a": McpStdio(command="x", prefix="a.")}, "mcp.a", "prefix"),
        ({"a": McpStdio(command="x", prefix="p_"), "b": McpStdio(command="y", prefix="p_")}, "mcp.a", "another server"),
        ({"a": McpStdio(command="x", env_pass=("NOT_THERE",))}, "mcp.a", "no NOT_THERE"),
        ({"a": McpHttp(url="ftp://x")}, "mcp.a", "http://"),
        ({"a": McpHttp(url="http://x", header_env={"Authorization": "NOT_THERE"})}, "mcp.a", "no NOT_THERE"),
    ],
)
async def test_an_invalid_server_is_reported_with_its_defect(
    servers: Mapping[str, McpSettings], where: str, problem: str
) -> None:
    with pytest.raises(SettingsError, match=problem) as raised:
        ToolRegistry({}, servers, env={})
    assert raised.value.where == where


async def test_without_the_package_the_settings_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("tokenbus_services.tools.mcp")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mcp", None)
    monkeypatch.setitem(sys.modules, "mcp_types", None)
    with pytest.raises(SettingsError, match="extra `mcp`"):
        ToolRegistry({}, {"a": McpStdio(command="x")}, env={})
