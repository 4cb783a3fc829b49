"""What the demo asks of whom."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tokenbus.errors import SettingsError
from tokenbus.providers import registry
from tokenbus_services.cli.demo import MODELS, environment, plan_for, request_of, settings_text
from tokenbus_services.settings import PythonTool, read_file
from tokenbus_services.weather import WEATHER_PARAMETERS


def test_without_a_provider_no_key_is_needed():
    plan = plan_for(None, None, {})
    assert plan.replayed


@pytest.mark.parametrize("api", MODELS)
def test_a_real_provider_needs_its_key_under_its_usual_name(api: str):
    variable = registry.get(next(known for known in MODELS if known == api)).default_key_env
    with pytest.raises(SettingsError, match=variable):
        plan_for(api, None, {})
    plan = plan_for(api, "my-model", {variable: "sk-secret"})
    assert (plan.replayed, plan.api, plan.model) == (False, api, "my-model")
    assert "sk-secret" not in str(plan)


@pytest.mark.parametrize(
    ("api", "variable", "base_url"),
    [
        ("anthropic", "ANTHROPIC_BASE_URL", "http://h:2"),
        ("openai-chat", "OPENAI_BASE_URL", "http://h:2"),
        ("openai-responses", "OPENAI_BASE_URL", "http://h:2"),
        ("gemini", "GOOGLE_GEMINI_BASE_URL", "http://h:2/v1beta"),
    ],
)
def test_the_address_of_a_provider_is_taken_as_its_own_sdk_takes_it(api: str, variable: str, base_url: str):
    key = registry.get(next(known for known in MODELS if known == api)).default_key_env
    assert plan_for(api, None, {key: "k", variable: "http://h:2/"}).base_url == base_url
    assert plan_for(api, None, {key: "k"}).base_url is None


@pytest.mark.parametrize(
    ("api", "variable"),
    [
        ("anthropic", "ANTHROPIC_API_KEY"),
        ("openai-chat", "OPENAI_API_KEY"),
        ("openai-responses", "OPENAI_API_KEY"),
        ("gemini", "GEMINI_API_KEY"),
    ],
)
def test_services_read_a_real_providers_address_and_where_its_key_is_and_the_request_names_the_model(
    api: str, variable: str, tmp_path: Path
):
    plan = plan_for(api, "chosen", {variable: "sk-secret"})
    config = tmp_path / "tokenbus.toml"
    text = settings_text(plan, redis_url="redis://h:1", base_url="http://h:2", directory=tmp_path, blobs_port=4321)
    config.write_text(text, encoding="utf-8")
    assert "sk-secret" not in text
    request = request_of(plan)
    provider = read_file(config).providers[request.provider]
    known = registry.get(provider.api)
    assert (provider.api, provider.base_url) == (api, "http://h:2")
    assert (provider.api_key_env or known.default_key_env) == variable
    assert request.model == "chosen"


def test_an_api_that_is_not_built_is_refused_with_those_that_are():
    with pytest.raises(SettingsError, match="anthropic, openai-chat, openai-responses, gemini"):
        plan_for("nobody", None, {})


def test_the_settings_are_what_the_services_read(tmp_path: Path):
    awkward = tmp_path / 'a "quoted" \\ Zürich'
    awkward.mkdir()
    plan = plan_for(None, None, {})
    config = awkward / "tokenbus.toml"
    text = settings_text(plan, redis_url="redis://h:1", base_url="http://h:2", directory=awkward, blobs_port=4321)
    config.write_text(text, encoding="utf-8")
    settings = read_file(config)
    assert (settings.redis_url, settings.data_dir) == ("redis://h:1", str(awkward))
    assert settings.blobs.service_url == f"http://127.0.0.1:{settings.http.blobs}"
    provider = settings.providers[request_of(plan).provider]
    assert (provider.base_url, provider.api_key_env) == ("http://h:2", "")
    [request] = request_of(plan).tools
    tool = settings.tools[request.name]
    assert isinstance(tool, PythonTool)
    assert tool.parameters == WEATHER_PARAMETERS
    assert msgspec.json.encode(settings.tool_definitions)


def test_the_demo_takes_nothing_of_the_users_deployment():
    env = {"TOKENBUS_REDIS_URL": "redis://theirs", "TOKENBUS_PARTITIONS": "3", "TOKENBUS_DATA": "/theirs", "A": "b"}
    seen = environment(env, Path("/demo.toml"))
    assert "redis://theirs" not in seen.values()
    assert not {"TOKENBUS_PARTITIONS", "TOKENBUS_DATA"} & seen.keys()
    assert (seen["A"], seen["TOKENBUS_CONFIG"]) == ("b", "/demo.toml")


def test_the_demo_uses_no_proxy_for_its_own_connections():
    seen = environment({"HTTP_PROXY": "http://proxy:1", "NO_PROXY": "corp.example"}, Path("/demo.toml"))
    assert seen["NO_PROXY"] == "corp.example,127.0.0.1"
