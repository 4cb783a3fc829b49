"""`tokenbus check`: what a settings file names is imported and checked, without a server."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.services.cli.process import run
from tokenbus_services.cli.doctor.check_file import examine
from tokenbus_services.cli.doctor.checks import Finding, one_hint_per_cause

MODULE = """
def roll(sides: int = 6) -> int:
    return 4

async def polite(chunk, state, context):
    await context.send(chunk)

def store():
    raise RuntimeError("a check calls nothing")

class Broken:
    pass
"""
GOOD = """
[blobs]
loader = "the_checked:store"
[tools.roll]
kind = "python"
call = "the_checked:roll"
[tools.search]
kind = "http"
url = "https://search.example/query"
header_env = { Authorization = "THE_SEARCH_AUTH" }
[policies.polite]
use = "the_checked:polite"
[gateway]
models = ["anthropic/claude-haiku-4-5"]
"""
BAD: dict[str, tuple[str, str, str]] = {
    "a function that is not there": ('[tools.t]\nkind = "python"\ncall = "the_checked:rol"', "tool t", "has no 'rol'"),
    "a module that is not there": ('[tools.t]\nkind = "python"\ncall = "no_such:f"', "tool t", "cannot be imported"),
    "a schema that is none": (
        '[tools.t]\nkind = "python"\ncall = "the_checked:roll"\nparameters = { type = "objekt" }',
        "tool t",
        "tools.t.parameters",
    ),
    "a private address": ('[tools.t]\nkind = "http"\nurl = "http://10.0.0.1/x"', "tool t", "allow_private"),
    "an MCP server's address": ('[mcp.m]\nkind = "http"\nurl = "nowhere"', "mcp m", "must start with http"),
    "a class that is not a policy": ('[policies.p]\nuse = "the_checked:Broken"', "policy p", "neither a class"),
    "options of a policy": (
        '[policies.p]\nuse = "tokenbus.policy:ToolRules"\noptions = { dney = [] }',
        "policy p",
        "dney",
    ),
    "a loader": ('[blobs]\nloader = "the_checked:nothing"', "blob loader", "cannot be imported"),
    "an object store": ('[blobs]\nurl = "azur://bucket"', "blob store", "did you mean 'azure'?"),
    "an auth object": ('[providers.anthropic]\nauth = "the_checked:no"', "provider anthropic", "AttributeError"),
    "two services on a port": ("[http]\nparser = 8081", "ports", "http.parser and http.fetcher are both 8081"),
    "a port": ("[http]\nparser = 70000", "ports", "70000 is not 0 to 65535"),
    "the server's address": ('redis_url = "http://x"', "redis_url", "must be redis"),
    "an alias": ('[gateway.aliases]\nfast = ["gemni/flash"]', "gateway", "unknown provider 'gemni'"),
    "an open gateway": (
        '[gateway]\n[blobs]\nloader = "the_checked:store"\n[http]\nhost = "0.0.0.0"',
        "gateway",
        "no keys are configured",
    ),
    "a route to no provider": (
        '[policies.p]\nuse = "the_checked:polite"\n[[policy_routes]]\npolicies = ["p"]\nproviders = ["gemni"]',
        "names",
        "no provider is called 'gemni'; did you mean 'gemini'?",
    ),
    "a tool of the gateway": ('[gateway]\ntools = ["rol"]', "names", "gateway.tools: no tool is called 'rol'"),
    "a policy of a key": ('[gateway.keys.k]\npolicies = ["p"]', "names", "no policy is called 'p'"),
    "a value": ("[limits]\nlag_byte = 1", "settings", "did you mean 'lag_bytes'?"),
}


@pytest.fixture(autouse=True)
def _path() -> Generator[None]:
    """Leaves the path and the modules as they were."""
    before = [*sys.path]
    yield
    sys.path[:] = before
    sys.modules.pop("the_checked", None)


def found_in(directory: Path, text: str) -> list[Finding]:
    (directory / "the_checked.py").write_text(MODULE)
    (directory / "tokenbus.toml").write_text(text)
    return examine({"TOKENBUS_CONFIG": str(directory / "tokenbus.toml"), "PATH": "/usr/bin:/bin"})


@pytest.mark.parametrize("fault", sorted(BAD))
def test_each_fault_is_found_and_named_with_a_hint(tmp_path: Path, fault: str) -> None:
    text, about, says = BAD[fault]
    wrong = [finding for finding in found_in(tmp_path, text) if finding.level == "wrong"]
    assert [finding.about for finding in wrong] == [about]
    assert says in wrong[0].says
    assert wrong[0].todo


def test_every_wrong_key_and_value_is_named_at_once(tmp_path: Path) -> None:
    text = '[provider.x]\napi = "anthropic"\n[tools.w]\nkind = "pyton"\n[limits]\nlag_byte = 1\nlag_bytes = "much"\n'
    found = found_in(tmp_path, text)
    hints = (
        "did you mean 'providers'?",
        "did you mean 'python'?",
        "did you mean 'lag_bytes'?",
        "must be a whole number",
    )
    assert [finding.level for finding in found] == ["wrong"] * len(hints)
    assert all(hint in finding.says for hint, finding in zip(hints, found, strict=True))


def test_the_keys_of_the_archive_are_tried_where_they_are(tmp_path: Path) -> None:
    keys = tmp_path / "keys"

    def finding() -> Finding:
        [found] = [one for one in found_in(tmp_path, f'[archive]\nkeys = "{keys}"') if one.about == "archive keys"]
        return found

    assert (finding().level, finding().todo) == ("note", "mount it where the blob service runs")
    keys.mkdir()
    (keys / "acme%2Feu.key").write_text("k" * 40)
    assert (finding().level, finding().says) == ("ok", "can be used, of acme%2Feu")
    (keys / "other.key").write_text("short")
    assert finding().level == "wrong"
    assert "other.key: each line must be a key of 32 characters" in finding().says


def test_a_valid_file_has_only_notes_about_settings_from_elsewhere(tmp_path: Path) -> None:
    found = found_in(tmp_path, GOOD)
    assert {finding.level for finding in found} == {"ok", "note"}
    messages = {finding.about: finding.says for finding in found if finding.level == "ok"}
    assert {"tool roll", "tool search", "policy polite", "blob loader"} <= set(messages)
    todo = next(finding.todo for finding in found if finding.about == "tool search")
    assert todo == "set THE_SEARCH_AUTH where the tool executors run"


def test_what_the_gateways_guides_take_from_the_mock_provider_is_a_note(tmp_path: Path) -> None:
    text = '[gateway]\ntools = ["weather"]\n[gateway.aliases]\nfast = ["mock-anthropic/claude-haiku-4-5"]'
    found = found_in(tmp_path, text)
    assert not [finding for finding in found if finding.level == "wrong"]
    messages = [finding.says for finding in found if finding.about == "gateway"]
    assert messages == ["gateway.aliases name mock-anthropic, which only `up --mock` has"]


async def test_the_command_says_what_is_wrong_and_ends_with_1(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        '[tools.t]\nkind = "python"\ncall = "no_such_module:f"\n[http]\nparser = 8081\n'
    )
    ended = await run("check", "--json", str(tmp_path / "mine.toml"))
    assert ended.code == 1
    assert {f["about"] for f in json.loads(ended.out) if f["level"] == "wrong"} == {"tool t", "ports"}


def test_problems_with_one_remedy_have_one_hint() -> None:
    findings = [Finding(level="wrong", about=about, says="x", todo="do this") for about in ("a", "b")]
    findings.append(Finding(level="wrong", about="c", says="x", todo="do that"))
    assert [finding.todo for finding in one_hint_per_cause(findings)] == ["do this", None, "do that"]
