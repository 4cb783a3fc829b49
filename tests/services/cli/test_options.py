"""What options become before anything is started or sent."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tokenbus.errors import RequestInvalid, SettingsError
from tokenbus_services.cli.runs.send import from_file, from_options
from tokenbus_services.cli.service_registry import SERVICES, services_of
from tokenbus_services.cli.up.command import parse_scales, parse_services, slots_for, withheld_from
from tokenbus_services.settings import (
    GatewaySettings,
    HttpTool,
    McpStdio,
    PolicySettings,
    ProviderSettings,
    PythonTool,
    RecordSettings,
    Settings,
    StageSettings,
    WebhookSettings,
)


def test_up_runs_one_worker_of_each_service_and_those_for_records_policies_and_the_gateway_if_configured():
    policies = {"guard": PolicySettings(use="a:B")}
    hooks = {"all": WebhookSettings(url="https://example.com/", secret_env="HOOK")}
    everything = Settings(records=RecordSettings(), policies=policies, gateway=GatewaySettings(), webhooks=hooks)
    assert services_of(everything) == [service for service in SERVICES if service != "pipeline"]
    services = services_of(Settings())
    optional = ("recorder", "webhooks", "policy", "pipeline", "gateway")
    assert services == [service for service in SERVICES if service not in optional]
    slots = slots_for(services, {})
    assert [slot.name for slot in slots] == services
    assert not any(slot.arguments for slot in slots), "each on the port of the settings"


def test_chained_one_pipeline_worker_replaces_fetcher_normalizer_and_parser():
    chained = Settings(stages=StageSettings(chained=True))
    assert services_of(chained) == ["pipeline", "blobs"]
    assert services_of(replace(chained, records=RecordSettings())) == ["pipeline", "blobs", "recorder"]


@pytest.mark.parametrize(
    "tools", [{"tools": {"add": PythonTool(call="m:add")}}, {"mcp": {"files": McpStdio(command="files")}}]
)
def test_chained_a_tool_executor_runs_if_the_settings_have_tools(tools: dict[str, Any]):
    assert "tools" in services_of(replace(Settings(stages=StageSettings(chained=True)), **tools))


def test_chained_a_tool_executor_runs_with_the_mock_provider_which_has_a_tool():
    chained = Settings(stages=StageSettings(chained=True))
    assert services_of(chained, mock=True) == ["pipeline", "tools", "blobs"]


def test_further_workers_of_a_service_take_any_free_port():
    slots = slots_for(parse_services("parser, fetcher"), parse_scales(["parser=3", "fetcher=1"]))
    assert [(slot.name, slot.arguments) for slot in slots] == [
        ("fetcher", ()),
        ("parser-1", ()),
        ("parser-2", ("--port", "0")),
        ("parser-3", ("--port", "0")),
    ]


def test_a_service_scaled_to_nothing_does_not_run():
    assert "tools" not in [slot.service for slot in slots_for(services_of(Settings()), parse_scales(["tools=0"]))]


@pytest.mark.parametrize("text", ["parser", "parser=", "parser=two", "parser=-1", "nobody=2"])
def test_a_scale_that_is_none_is_refused(text: str):
    with pytest.raises(SettingsError, match="--scale"):
        parse_scales([text])


def test_unknown_services_and_none_at_all_are_refused():
    with pytest.raises(SettingsError, match="nobody"):
        parse_services("parser,nobody")
    with pytest.raises(SettingsError, match="--services"):
        parse_services(" ,")
    with pytest.raises(SettingsError, match="--services"):
        slots_for([], {})


def test_options_make_a_request():
    request = from_options({"provider": "p", "model": "m", "text": "hi", "id": None, "max_tokens": 9}, ["weather"])
    assert request == {
        "type": "generate",
        "provider": "p",
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 9,
        "tools": [{"name": "weather"}],
    }


@pytest.mark.parametrize("missing", ["provider", "model", "text"])
def test_an_option_that_is_needed_is_asked_for_by_name(missing: str):
    options = {"provider": "p", "model": "m", "text": "hi", missing: None}
    with pytest.raises(RequestInvalid, match=f"--{missing}"):
        from_options(options)


@pytest.mark.parametrize("data", [b"{", b"[]", b"\xff"])
def test_a_file_that_holds_no_json_object_is_named(data: bytes):
    with pytest.raises(RequestInvalid, match=r"ask\.json"):
        from_file("ask.json", data)


def test_provider_keys_are_for_the_fetcher_alone_and_for_the_tools_that_name_one() -> None:
    settings = Settings(
        providers={"a": ProviderSettings(api="openai-chat", api_key_env="A"), "b": ProviderSettings(api="anthropic")},
        tools={"t": HttpTool(url="http://h", header_env={"X": "A"})},
        mcp={"m": McpStdio(command="x", env_pass=("OTHER",))},
    )
    assert withheld_from("fetcher", settings) == withheld_from("pipeline", settings) == frozenset()
    keys = {"A", "A_FILE", "ANTHROPIC_API_KEY", "ANTHROPIC_API_KEY_FILE"}
    assert withheld_from("parser", settings) == withheld_from("policy", settings) == keys
    assert withheld_from("tools", settings) == keys - {"A", "A_FILE"}
