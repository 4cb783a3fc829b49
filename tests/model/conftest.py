"""A server of the models' own, that trims exactly: what is needed and trimmed is then missed."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from tests.model.actors import Wire
from tests.servers import binary
from tokenbus.bus.stage import checkpoints
from tokenbus_services.process.embedded_server import EmbeddedServer


@pytest.fixture(scope="module")
def wire() -> Generator[Wire]:
    with EmbeddedServer(binary=binary(), options={"stream-node-max-entries": "1"}) as server:
        yield Wire(server.url)


@pytest.fixture(autouse=True)
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints after a few entries, so that the watermark moves past open runs, and runs that wait are restored."""
    monkeypatch.setattr(checkpoints, "CHECKPOINT_SPAN", 300)
    monkeypatch.setattr(checkpoints, "MAX_CHECKPOINT_SPAN", 600)
