"""A process imports what it needs: each start of a worker pays for every module, in time and in memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tokenbus
import tokenbus_services


def _loaded(*modules: str) -> set[str]:
    code = f"import sys, {', '.join(modules)}\nprint(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_a_worker_loads_no_client_no_mock_provider_and_no_gateway():
    loaded = _loaded("tokenbus_services.cli.main", "tokenbus_services.cli.worker", "tokenbus_services.pipeline.app")
    for unwanted in ("tokenbus.client.client", "tokenbus.shaping", "tokenbus_services.mock_provider"):
        assert unwanted not in loaded
    assert not [name for name in loaded if name.startswith("tokenbus_services.gateway")]


def test_up_loads_no_services():
    loaded = _loaded("tokenbus_services.cli.main", "tokenbus_services.cli.up.command")
    assert not {"faststream", "pydantic", "httpx", "prompt_toolkit", "tokenbus_services.mock_provider"} & loaded


def test_a_chat_through_pipes_loads_no_terminal():
    assert "prompt_toolkit" not in _loaded("tokenbus_services.cli.main", "tokenbus_services.cli.chat.command")


def test_a_process_of_tools_calls_loads_no_client_of_the_server_and_no_settings():
    loaded = _loaded("tokenbus_services.executor.fork_server", "tokenbus_services.tools.python.calls")
    assert not {"redis", "httpx", "faststream", "tokenbus_services.settings", "tokenbus.providers.registry"} & loaded


def test_services_load_nothing_of_mcp_which_the_demo_has_not():
    apps = sorted(file.parent.name for file in Path(tokenbus_services.__file__).parent.glob("*/app.py"))
    loaded = {name.partition(".")[0] for name in _loaded(*(f"tokenbus_services.{app}.app" for app in apps))}
    assert "faststream" in loaded
    assert not {"mcp", "mcp_types", "httpx2"} & loaded


def test_each_name_of_the_library_is_there_when_it_is_asked_for():
    assert "tokenbus.client.client" not in _loaded("tokenbus")
    assert {*tokenbus.__all__} <= {*dir(tokenbus)}
    for name in tokenbus.__all__:
        assert getattr(tokenbus, name) is not None
    assert tokenbus.Client.__name__ == "Client"
    with pytest.raises(AttributeError, match="no attribute 'Clients'"):
        tokenbus.Clients  # noqa: B018 # pyright: ignore


def test_the_collector_is_off_while_a_worker_imports_and_on_when_it_runs():
    code = """
import gc
from tokenbus_services.cli import entry
from tokenbus_services.cli import worker
from tokenbus_services.cli.worker import collect_less_often

def run(*arguments, **options):
    print(gc.isenabled())
    collect_less_often()
    print(gc.isenabled())

worker.run = run
entry.main(["worker", "blobs"])
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False", "True"]


@pytest.mark.parametrize("command", ["worker", "up", "runs"])
def test_a_command_loads_nothing_that_its_libraries_only_might_use(command: str):
    code = f"""
import sys, types
from tokenbus_services.cli import entry
main = sys.modules["tokenbus_services.cli.main"] = types.ModuleType("main")

def run(arguments):
    import httpx
    print(*(name for name in sys.modules if name.split(".")[0] in ("redis", "structlog", "rich", "opentelemetry")))

main.main = run
entry.main(["{command}", "blobs"])
import opentelemetry.sdk.metrics, rich
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {name.partition(".")[0] for name in ran.stdout.split()} == {"redis", "structlog"}


def test_the_collector_is_on_in_every_other_command():
    code = """
import gc
from tokenbus_services.cli import entry
from tokenbus_services.cli.main import tokenbus
tokenbus.commands["top"].callback = lambda **options: print(gc.isenabled())
entry.main(["top"])
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["True"]
