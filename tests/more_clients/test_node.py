"""OpenAI's client for Node: Chat Completions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.clients import node
from tests.more_clients.conftest import TEXT

SOURCES = Path(__file__).parent


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory, base: str) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("node")
    (directory / "node_modules").symlink_to(node.packages(SOURCES))
    shutil.copy(SOURCES / "chat.mjs", directory)
    done = node.run("chat.mjs", base, cwd=directory)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_openais_client_for_node_reads_text_thinking_and_usage(printed: dict[str, Any]) -> None:
    assert (printed["whole"], printed["text"], printed["deltas"], printed["reasoning"]) == (TEXT, TEXT, TEXT, "Hm.")
    assert printed["usage"]


def test_openais_client_for_node_runs_a_tool_and_sends_the_result_back(printed: dict[str, Any]) -> None:
    assert printed["calls"] == [["get_weather", '{"city":"Bonn"}']]
    assert printed["answer"] == "So: rain in Bonn"


def test_openais_client_for_node_gets_an_error_for_a_cut_a_failure_and_a_refusal(printed: dict[str, Any]) -> None:
    assert printed["cut"]["name"] == "APIError"
    assert printed["failing"]["status"] == 400
    assert (printed["refused"]["status"], printed["refused"]["param"]) == (400, "n")
