"""`tokenbus demo`: what a person sees who has just cloned the repository, and what is left of it: nothing."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.services.cli.process import TOKENBUS, descendants, environment, running
from tests.services.cli.process import run_process as run
from tokenbus_services.mock_provider import MockProvider, Reply, Status, Turn
from tokenbus_services.mock_provider.demo import DEMO_PROMPT, demo_scripts


@pytest.fixture
def temporary(tmp_path: Path) -> dict[str, str]:
    """An environment in which the demo's directory and all its processes can be found."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    return {"TMPDIR": str(directory)}


def nothing_left(temporary: dict[str, str]) -> bool:
    directory = Path(temporary["TMPDIR"])
    assert not list(directory.iterdir())
    assert not descendants(directory)
    return True


def stored_replies() -> list[Reply]:
    """What the model says in the demo's turns."""
    [script] = demo_scripts()
    replies = [turn.says for turn in script.turns]
    return [reply for reply in replies if isinstance(reply, Reply)]


async def test_the_demo_shows_thinking_text_and_the_tools_turn_and_leaves_nothing_behind(temporary: dict[str, str]):
    first, second = stored_replies()
    ended = await run("demo", **temporary)
    assert ended.code == 0, ended.err
    assert ended.err == ""
    in_order = [
        f"[user] {DEMO_PROMPT}\n",
        f"[thinking] {first.thinking}\n",
        f"{first.text}\n",
        '[tool call weather] {"city":"Zürich"}\n',
        "[tool result weather] {",
        f"{second.text}\n",
        "[completed] stop\n",
        "[usage] ",
        "[timing] ",
    ]
    places = [ended.out.find(part) for part in in_order]
    assert -1 not in places, ended.out
    assert places == sorted(places)
    assert nothing_left(temporary)


async def test_on_a_terminal_the_blocks_are_in_panels_and_a_real_provider_gets_its_key_and_the_chosen_model(
    temporary: dict[str, str],
):
    """Of one provider; `test_plan` says of each which key, address and model its services get."""
    [script] = demo_scripts()
    choose: Callable[..., Turn] = lambda requests: script.turns[requests.turn]  # noqa: E731
    async with MockProvider(choose=choose) as provider:
        env = {"GEMINI_API_KEY": "sk-real", "GOOGLE_GEMINI_BASE_URL": provider.url, **temporary}
        code, screen = await on_terminal("demo", "--provider", "gemini", "--model", "chosen", **env)
        requests = [exchange.request for exchange in provider.requests]
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen)
    assert code == 0, text
    assert [a.model for a in requests if a] == ["chosen", "chosen"]
    assert all("sk-real" in " ".join(a.headers.values()) for a in requests if a)
    assert "sk-real" not in text
    for title in ("user", "thinking", "text", "tool call weather", "tool result weather"):
        assert f"╭─ {title} ─" in text
    assert "starting" in text, "progress while services start"
    assert "\x1b[?25h" in screen, "the cursor is there again"
    assert nothing_left(temporary)


async def on_terminal(*arguments: str, **env: str) -> tuple[int, str]:
    """Run the command on a terminal; return its exit code and all that was written there."""
    ours, its = pty.openpty()
    os.set_blocking(ours, False)
    size = {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
    process = await asyncio.create_subprocess_exec(
        *TOKENBUS, *arguments, stdin=its, stdout=its, stderr=its, env=environment(**env, **size)
    )
    os.close(its)
    screen = bytearray()

    def read() -> None:
        with suppress(OSError):
            screen.extend(os.read(ours, 65_536))

    loop = asyncio.get_running_loop()
    loop.add_reader(ours, read)
    code = await process.wait()
    loop.remove_reader(ours)
    read()
    os.close(ours)
    return code, screen.decode()


async def test_a_key_that_the_provider_refuses_is_the_error_in_event_and_record(temporary: dict[str, str]):
    refusing = Turn(says=Reply(text=""), fault=Status(status=401))
    async with MockProvider(choose=lambda request: refusing) as provider:
        env = {"ANTHROPIC_API_KEY": "sk-wrong", "ANTHROPIC_BASE_URL": provider.url, **temporary}
        ended = await run("demo", "--provider", "anthropic", "--keep", **env)
    assert ended.code == 5
    assert "failed" in ended.error
    assert "sk-wrong" not in ended.out + ended.err
    kept = Path(ended.out.splitlines()[-1].removeprefix("[kept] "))
    assert {"tokenbus.toml", "fetcher.log", "parser.log"} <= set(os.listdir(kept))
    assert not descendants(kept)


@pytest.mark.parametrize("moment", ["[ready] server", "[user]"])
async def test_ctrl_c_at_any_moment_leaves_nothing(moment: str, temporary: dict[str, str], tmp_path: Path):
    async with running(tmp_path / "err", "demo", **temporary) as demo:
        await demo.says(moment)
        assert await demo.stop(signal.SIGINT) == 130
    assert demo.log.read_text() == ""
    assert nothing_left(temporary)


async def test_without_its_key_a_real_provider_is_not_tried(temporary: dict[str, str]):
    ended = await run("demo", "--provider", "anthropic", **{**temporary, "ANTHROPIC_API_KEY": ""})
    assert ended.code == 2
    assert "ANTHROPIC_API_KEY" in ended.error
    assert nothing_left(temporary)
