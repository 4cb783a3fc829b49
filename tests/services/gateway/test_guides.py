"""The settings on the pages about the gateway: a reader copies them, runs `tokenbus up --mock`, and it starts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tokenbus_services.cli.mock import with_mock
from tokenbus_services.gateway.app import model_table
from tokenbus_services.settings import load

DOCS = Path(__file__).parents[3] / "docs"
BLOCKS = [
    (f"{page.stem}-{number}", block)
    for page in sorted(DOCS.rglob("*.md"))
    for number, block in enumerate(re.findall(r"^```toml\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE))
    if "[gateway" in block
]


def test_the_client_pages_have_settings() -> None:
    assert {"gateway-0", "gateway-anthropic-0", "use-chat-0"} <= {name for name, _ in BLOCKS}


@pytest.mark.parametrize(("name", "block"), BLOCKS, ids=[name for name, _ in BLOCKS])
def test_a_gateway_starts_with_the_settings_of_the_page(name: str, block: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenbus.toml"
    path.write_text(block)
    settings = with_mock(load({"TOKENBUS_CONFIG": str(path), "TOKENBUS_REDIS_URL": "redis://127.0.0.1:1"}), "http://m")
    assert settings.gateway
    table = model_table(settings, settings.gateway)
    for model in table.names():
        assert table.resolve(model).provider in settings.providers
    assert {tool for tool in settings.gateway.tools if tool != "*"} <= {*settings.tools}
