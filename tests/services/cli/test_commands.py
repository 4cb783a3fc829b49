"""The command line itself: what it says and how it ends."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.services.cli.process import run_process as run
from tests.services.cli.process import settings_file
from tokenbus import __version__
from tokenbus_services.cli.main import main


async def test_the_version_is_the_packages():
    assert await run("--version") == (0, f"tokenbus {__version__}\n", "")


async def test_a_wrong_option_is_one_line_and_exit_code_2():
    ended = await run("worker", "nobody")
    assert ended.code == 2
    assert "nobody" in ended.error
    assert "tokenbus worker --help" in ended.error


async def test_a_missing_argument_is_one_line_with_its_choices():
    ended = await run("tail")
    assert ended.code == 2
    assert ended.err.count("\n") == 1
    assert "visible, chunks, blocks, runs, decisions, sessions (see: tokenbus tail --help)" in ended.error


@pytest.mark.parametrize("group", [(), ("dead",)])
def test_a_group_without_a_command_is_its_help(group: tuple[str, ...], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(group)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(" ".join(("Usage: tokenbus", *group, "[OPTIONS] COMMAND")))


@pytest.mark.parametrize("command", [("tail", "visible"), ("send",), ("send", "--text", "hi")])
async def test_without_a_server_to_talk_to_it_says_what_to_set_and_where_it_looked(
    command: tuple[str, ...], tmp_path: Path
):
    ended = await run(*command, TOKENBUS_DATA=str(tmp_path))
    assert ended.code == 2
    assert str(tmp_path) in ended.error
    assert "TOKENBUS_REDIS_URL" in ended.error
    assert "tokenbus up" in ended.error


async def test_wrong_settings_are_named_with_file_and_key(tmp_path: Path):
    config = tmp_path / "t.toml"
    config.write_text('[http]\nfetcher = "x"\n')
    ended = await run("send", "--provider", "p", "--model", "m", "--text", "t", TOKENBUS_CONFIG=str(config))
    assert ended.code == 2
    assert f"{config}: http.fetcher" in ended.error


@pytest.mark.parametrize("command", [("tail", "runs"), ("follow", "r"), ("cancel", "r")])
async def test_a_server_that_is_down_is_exit_code_3_and_the_error_says_who_named_it(
    command: tuple[str, ...], tmp_path: Path
):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    url = f"redis://:secret@127.0.0.1:{port}"
    ended = await run(*command, TOKENBUS_REDIS_URL=url)
    assert ended.code == 3
    assert f"127.0.0.1:{port}" in ended.error
    assert "TOKENBUS_REDIS_URL in the environment" in ended.error
    assert "secret" not in ended.error
    config = settings_file(tmp_path, f'redis_url = "{url}"')
    ended = await run(*command, TOKENBUS_CONFIG=config)
    assert (ended.code, f"redis_url in {config}" in ended.error, "secret" in ended.error) == (3, True, False)


async def test_the_origin_of_an_error_is_shown_only_on_request(tmp_path: Path):
    ended = await run("--verbose", "tail", "visible", TOKENBUS_DATA=str(tmp_path))
    assert ended.code == 2
    assert "Traceback" in ended.err
    assert ended.err.splitlines()[-1].startswith("error: ")
