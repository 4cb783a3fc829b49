"""`tokenbus runs`, and `cancel` of unknown runs and of many at once."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from rich.console import Console

from tests.contract.client.listed import Listed
from tests.services.cli.process import run, settings_file
from tests.services.cli.runs.test_run_commands import requests
from tokenbus import RunInfo
from tokenbus.bus.keys import Keys
from tokenbus.bus.layout import join_deployment
from tokenbus.bus.server.server import Server
from tokenbus.errors import SettingsError
from tokenbus_services.cli.main import tokenbus
from tokenbus_services.cli.runs.list_runs import RunChoice, age_text, seconds, table

LONG = "0199d2a0-7c00-7000-8000-000000000001"
FAILED = RunInfo(
    run=LONG, state="failed", accepted_ms=0, ended_ms=0, provider="anthropic", model="claude-sonnet-4-5-20250929",
    tenant="a-tenant-with-a-long-name", finish="error", error="rate_limited",
)  # fmt: skip
OPEN = RunInfo(run="r\x1b[31m2", state="running", accepted_ms=3_600_000)


@pytest.fixture
async def deployment(server: Server, server_url: str, keys: Keys, tmp_path: Path) -> tuple[Listed, str]:
    """Writes runs, and the settings of their deployment."""
    await join_deployment(server, keys)
    text = f'redis_url = "{server_url}"\nprefix = "{keys.prefix}"\npartitions = {keys.partitions}'
    return Listed(server, keys), settings_file(tmp_path, text)


def shown(width: int) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(table([FAILED, OPEN], now_ms=3_660_000, width=width))
    return console.export_text()


def test_the_table_is_whole_on_a_terminal_of_60_columns() -> None:
    lines = [line for line in shown(60).splitlines() if line.strip()]
    assert max(map(len, lines)) <= 60
    assert lines[0].split() == ["run", "state", "age"]
    assert lines[1].split() == [LONG, "failed", "1h"]
    assert lines[2].startswith("  error rate_limited · anthropic/claude")
    assert lines[3].split()[1:] == ["running", "1m"]
    assert "\x1b" not in lines[3]


def test_a_wide_table_has_a_column_for_each_fact() -> None:
    lines = [line for line in shown(140).splitlines() if line.strip()]
    assert lines[0].split() == ["run", "state", "age", "tenant", "provider/model", "end"]
    assert lines[2].split()[-3:] == ["anthropic/claude-sonnet-4-5-20250929", "error", "rate_limited"]


def test_ages_are_parsed_and_printed_in_their_units() -> None:
    assert [seconds(age) for age in ("90", "90s", "10m", "1.5h", "2d")] == [90, 90, 600, 5400, 172_800]
    assert [age_text(s * 1000) for s in (-5, 59, 60, 7199, 86_400)] == ["0s", "59s", "1m", "1h", "1d"]


@pytest.mark.parametrize(
    ("choice", "problem"),
    [
        (RunChoice(states=("fialed",)), "--state: unknown 'fialed': did you mean 'failed'?"),
        (RunChoice(older_than="soon"), "--older-than: 'soon' is not an age"),
        (RunChoice(tenant=""), "--tenant: '' is not a text, or empty"),
    ],
)
def test_a_wrong_choice_is_named_by_its_option(choice: RunChoice, problem: str) -> None:
    with pytest.raises(SettingsError) as caught:
        choice.check()
    assert problem in str(caught.value)


async def test_runs_are_listed_by_choice(deployment: tuple[Listed, str]) -> None:
    listed, config = deployment
    await listed.accept("old", 1000, "provider", "p", "model", "m", "tenant", "acme")
    await listed.accept("new", 2000)
    await listed.end("new", "failed", "finish", "error", "error", "auth")
    opened = await run("runs", "--state", "open", "--older-than", "1h", TOKENBUS_CONFIG=config)
    [line] = opened.out.splitlines()
    assert (opened.code, line.split()[:2], line.split()[3:]) == (0, ["old", "queued"], ["acme", "p/m", "-"])
    every = await run("runs", "--json", "--limit", "1", TOKENBUS_CONFIG=config)
    assert json.loads(every.out)["error"] == "auth"
    none = await run("runs", "--tenant", "nobody", TOKENBUS_CONFIG=config)
    assert none == (0, "", "no such runs\n")


async def test_the_cancel_of_an_unknown_run_reports_that(deployment: tuple[Listed, str]) -> None:
    listed, config = deployment
    await listed.accept("over", 1000)
    await listed.end("over")
    ended = await run("cancel", "nobody", TOKENBUS_CONFIG=config)
    assert ended.code == 1
    assert "unknown run nobody" in ended.error
    assert [request["run"] for request in await requests(listed.server, listed.keys)] == ["nobody"], "it may still wait"
    over = await run("cancel", "over", TOKENBUS_CONFIG=config)
    assert over == (0, "", "run over has ended already: completed\n")
    assert len(await requests(listed.server, listed.keys)) == 1


async def test_a_cancel_of_many_runs_requires_a_confirmation(deployment: tuple[Listed, str]) -> None:
    listed, config = deployment
    for n in range(3):
        await listed.accept(f"r{n}", 1000 + n, "tenant", "acme" if n else "other")
    nobody_there = await run("cancel", "--tenant", "acme", TOKENBUS_CONFIG=config)
    assert nobody_there.code == 2
    assert "--yes" in nobody_there.error
    nothing_chosen = await run("cancel", TOKENBUS_CONFIG=config)
    assert nothing_chosen.code == 2
    assert "--older-than" in nothing_chosen.error
    ended_ones = await run("cancel", "--state", "failed", "--yes", TOKENBUS_CONFIG=config)
    assert "have ended" in ended_ones.error
    assert await requests(listed.server, listed.keys) == []
    command = await run("cancel", "--tenant", "acme", "--yes", "--reason", "stop", TOKENBUS_CONFIG=config)
    assert (command.code, command.out) == (0, "r1\nr2\n")
    assert sorted(request["run"] for request in await requests(listed.server, listed.keys)) == ["r1", "r2"]


def completed(monkeypatch: pytest.MonkeyPatch, settings: str, *words: str) -> set[str]:
    """The values that a shell offers in place of the last word."""
    monkeypatch.setenv("TOKENBUS_CONFIG", settings)
    shell = ShellComplete(tokenbus, {}, "tokenbus", "_TOKENBUS_COMPLETE")
    return {item.value for item in shell.get_completions(list(words[:-1]), words[-1])}


def test_a_shell_completes_configured_providers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = settings_file(tmp_path, '[providers.groq]\napi = "openai-chat"\nbase_url = "http://127.0.0.1:1"')
    assert completed(monkeypatch, settings, "send", "--provider", "g") == {"gemini", "gemini-interactions", "groq"}
    assert completed(monkeypatch, settings, "runs", "--provider", "gr") == {"groq"}


async def test_a_shell_completes_runs(
    deployment: tuple[Listed, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runs, settings = deployment
    await runs.accept("apple", 1)
    await runs.accept("plum", 2)
    for command in (["follow"], ["cancel"], ["tail", "visible", "--run"]):
        found = await asyncio.to_thread(completed, monkeypatch, settings, *command, "pl")
        assert found == {"plum"}, command
    wrong = settings_file(tmp_path, "nothing = 1")
    assert await asyncio.to_thread(completed, monkeypatch, wrong, "follow", "pl") == set()
