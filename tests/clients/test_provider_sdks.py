"""The Messages and Gemini surfaces with the providers' own SDKs for Node, and the AI SDK's providers, unmodified."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.clients import node
from tokenbus.testing import CutOff, LocalBus, Reply, Status, ToolCall, Turn

SOURCES = Path(__file__).parent / "provider_sdks"
TEXT = "one two three"


def test_text_thinking_a_call_an_error_and_a_cut_are_read_by_each_client(tmp_path: Path) -> None:
    (tmp_path / "node_modules").symlink_to(node.packages(SOURCES))
    for name in ("package.json", "ask.mjs"):
        shutil.copy(SOURCES / name, tmp_path)
    with LocalBus("[gateway]\n") as bus:
        bus.model_says("text", Reply(thinking="let me see", text=TEXT))
        bus.model_says("calls", Reply(tool_calls=(ToolCall(name="weather", arguments={"city": "Rome"}),)))
        bus.model_says("refuses", Turn(says=Reply(), fault=Status(status=400)))
        bus.model_says("cut", Turn(says=Reply(text=TEXT), fault=CutOff(after_text="two")))
        done = node.run("ask.mjs", bus.gateway, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = json.loads(done.stdout.splitlines()[-1])
    assert len(printed) == 4
    for client, models in printed.items():
        text, calls, refused, cut = (models[name] for name in ("text", "calls", "refuses", "cut"))
        assert (text["text"], text["thinking"], text["error"]) == (TEXT, "let me see", None), client
        assert text["end"] in ("end_turn", "STOP", "stop"), client
        assert (calls["calls"], calls["error"]) == ([["weather", {"city": "Rome"}]], None), client
        assert refused["error"], client
        assert cut["error"], client
