"""A process imports what it needs: each start of a worker pays for every module, in time and in memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

import tokenbus


def _loaded(*modules: str) -> set[str]:
    code = f"import sys, {', '.join(modules)}\nprint(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_a_worker_loads_no_client_no_mock_provider_and_no_gateway():
    loaded = _loaded(
        "tokenbus_services.cli.main", "tokenbus_services.cli.worker.command", "tokenbus_services.pipeline.app"
    )
    for unwanted in ("tokenbus.client.client", "tokenbus.shaping", "tokenbus_services.mock_provider"):
        assert unwanted not in loaded
    assert not [name for name in loaded if name.startswith("tokenbus_services.gateway")]


def test_up_loads_no_services():
    loaded = _loaded("tokenbus_services.cli.main", "tokenbus_services.cli.up.command")
    assert not {"faststream", "pydantic", "httpx", "tokenbus_services.mock_provider"} & loaded


def test_each_name_of_the_library_is_there_when_it_is_asked_for():
    assert "tokenbus.client.client" not in _loaded("tokenbus")
    assert {*tokenbus.__all__} <= {*dir(tokenbus)}
    for name in tokenbus.__all__:
        assert getattr(tokenbus, name) is not None
    assert tokenbus.Client.__name__ == "Client"
    with pytest.raises(AttributeError, match="no attribute 'Clients'"):
        tokenbus.Clients  # noqa: B018 # pyright: ignore
