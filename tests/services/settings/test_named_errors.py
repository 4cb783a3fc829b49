"""A wrong setting is named with its table, a choice with its values; old names of settings still work."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import DEVNULL, PIPE
from pathlib import Path

import pytest

from tests.services.cli.process import ENDED_S, TOKENBUS, environment
from tokenbus.errors import SettingsError
from tokenbus_services.settings import Settings, load

USAGE = 2
"""Exit code of a wrong setting."""


async def ended_in(directory: Path, *command: str, **env: str) -> tuple[int | None, str]:
    """Run a command in this directory; return its exit code and its stderr."""
    process = await asyncio.create_subprocess_exec(
        *TOKENBUS, *command, cwd=directory, env=environment(**env), stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE
    )
    async with asyncio.timeout(ENDED_S):
        _, output = await process.communicate()
    return process.returncode, output.decode()


def loaded(directory: Path, text: str) -> Settings:
    path = directory / "tokenbus.toml"
    path.write_text(text)
    return load({"TOKENBUS_CONFIG": str(path)})


@pytest.mark.parametrize(
    ("text", "where", "problem"),
    [
        (
            '[providers.fine]\napi = "gemini"\n[providers.x]\napi = "gemni"',
            "providers.x.api",
            "gemini, gemini-interactions; did you mean 'gemini'?",
        ),
        ('[providers.x]\napi = "gemini"\n[providers.x.quirks]\ny = 1', "providers.x.quirks.y", "unknown key"),
        ('[limits.tenants.acme]\nconcurrency = "x"', "limits.tenants.acme.concurrency", "must be a whole number"),
        (
            '[limits.providers.gemini.models."a.b"]\nconcurrency = "x"',
            'limits.providers.gemini.models."a.b".concurrency',
            "must be a whole number of at least 1, not text in quotes",
        ),
        ('[policies.p]\nuse = "a:b"\non_error = "maybe"', "policies.p.on_error", "it may be block, pass"),
        ('topics = ["visble"]', "topics[0]", "did you mean 'visible'? It may be blocks, chunks, visible"),
        ('[tools.a]\nkind = "x"', "tools.a.kind", "it may be python, http"),
        ("[tools.a]\n", "tools.a", "the key `kind` is missing; it may be python, http"),
        ('[tools.a]\nkind = "python"\ncal = "a:b"', "tools.a.cal", "unknown key: did you mean 'call'?"),
        ('[tools.a]\nkind = "python"\ncall = "a:b"\nmethod = "GET"', "tools.a.method", "keys here: answer_timeout_s, "),
        ("[limits]\nlease_s = 3", "limits.lease_s", "it is a key of [stages]"),
        ("[providr.x]", "providr", "did you mean 'providers'?"),
        ("[stages]\nlinger_ms = 200", "stages.linger_ms", "a number of at least 0 and of at most 100, not 200"),
        ('[providers.x]\napi = "gemini"\nheaders = {"a b" = "c"}', "providers.x.headers", "the name of an HTTP header"),
        ('[gateway.keys.k]\nsha256 = "sk-plain"', "gateway.keys.k.sha256", "must be a SHA-256 of 64 hex digits"),
        ("[limits.providers.gemni]", "limits.providers.gemni", "unknown provider 'gemni': did you mean 'gemini'?"),
        (
            '[policies.polite]\nuse = "a:b"\n[[policy_routes]]\npolicies = ["polit"]',
            "policy_routes[0].policies",
            "unknown policy 'polit': did you mean 'polite'?",
        ),
    ],
)
def test_a_wrong_value_is_named_with_its_table_and_a_choice_with_its_values(
    tmp_path: Path, text: str, where: str, problem: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        loaded(tmp_path, text)
    assert caught.value.source == str(tmp_path / "tokenbus.toml")
    assert caught.value.where == where
    assert problem in caught.value.problem
    assert "sk-plain" not in str(caught.value), "a secret in the wrong place is not shown"


def test_a_default_provider_with_one_override_needs_no_api(tmp_path: Path) -> None:
    provider = loaded(tmp_path, '[providers.anthropic]\nbase_url = "https://a.example"').providers["anthropic"]
    assert (provider.api, provider.base_url) == ("anthropic", "https://a.example")
    with pytest.raises(SettingsError, match=r"providers\.mine: the key `api` is missing"):
        loaded(tmp_path, '[providers.mine]\nbase_url = "https://a.example"')


@pytest.mark.parametrize("command", [("up",), ("worker", "normalizer")])
async def test_the_settings_file_of_the_working_directory_is_used_and_named(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    file = tmp_path / "tokenbus.toml"
    file.write_text("[limits]\nnonsense = 1\n")
    code, output = await ended_in(tmp_path, *command)
    assert code == USAGE
    found, error = output.splitlines()
    assert found == f"settings: {file}, in the working directory, because TOKENBUS_CONFIG is not set"
    assert error.startswith(f"error: {file}: ")
    assert await ended_in(tmp_path, *command, "--help") == (0, "")
    other = tmp_path / "other.toml"
    other.write_text("[limits]\nnonsense = 2\n")
    code, output = await ended_in(tmp_path, *command, TOKENBUS_CONFIG=str(other))
    assert (code, output.partition(": ")[2].partition(": ")[0]) == (USAGE, str(other))


async def test_an_empty_variable_means_no_settings_file(tmp_path: Path) -> None:
    (tmp_path / "tokenbus.toml").write_text("[limits]\nnonsense = 1\n")
    _, output = await ended_in(
        *(tmp_path, "worker", "normalizer", "--port", "0"), TOKENBUS_CONFIG="", TOKENBUS_REDIS_URL="redis://127.0.0.1:1"
    )
    assert "tokenbus.toml" not in output
    assert "127.0.0.1:1 is unavailable" in output
