"""Which policies a run has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tokenbus.errors import RequestInvalid, SettingsError
from tokenbus.events.requests import Fallback, Generate, Message
from tokenbus_services.intake.accept import PolicyRoutes
from tokenbus_services.settings import load, read_file

TOML = """
[policies.one]
use = "a:B"
timeout_s = 2
[policies.two]
use = "a:B"
on_error = "pass"
timeout_s = 3
[policies.three]
use = "a:B"

[limits]
policy_slack_s = 5

[[policy_routes]]
policies = ["two", "one"]
models = ["gpt-*"]
[[policy_routes]]
policies = ["one", "three"]
tenants = ["kids"]
metadata = { channel = "public" }
"""


@pytest.fixture
def routes(tmp_path: Path) -> PolicyRoutes:
    path = tmp_path / "tokenbus.toml"
    path.write_text(TOML)
    return PolicyRoutes(read_file(path))


def request(model: str = "m", **fields: Any) -> Generate:
    return Generate(provider="anthropic", model=model, messages=[Message(role="user", content="hi")], **fields)


def names(routes: PolicyRoutes, request: Generate) -> tuple[str, ...]:
    policy_plan = routes.plan_for(request)
    return policy_plan.names if policy_plan else ()


def test_a_run_without_a_route_or_named_policy_has_no_policies(routes: PolicyRoutes) -> None:
    assert routes.plan_for(request()) is None
    assert names(routes, request(metadata={"tenant": "kids"})) == ()


def test_a_run_has_the_policies_of_all_its_routes_and_then_its_own_each_once(routes: PolicyRoutes) -> None:
    public_kids: dict[str, object] = {"tenant": "kids", "channel": "public"}
    assert names(routes, request("gpt-5")) == ("two", "one")
    assert names(routes, request("gpt-5", metadata=public_kids)) == ("two", "one", "three")
    assert names(routes, request("gpt-5", policies=["three", "one"])) == ("two", "one", "three")


@pytest.mark.parametrize("model", ["models/gpt-5", "GPT-5", " gpt-5", "publishers/x/models/gpt-5"])
def test_no_spelling_of_a_models_name_passes_its_policies_by(routes: PolicyRoutes, model: str) -> None:
    assert names(routes, request(model)) == ("two", "one")


def test_no_blank_around_a_tenants_name_passes_its_policies_by(routes: PolicyRoutes) -> None:
    assert names(routes, request(metadata={"tenant": " kids ", "channel": "public"})) == ("one", "three")


def test_a_run_may_continue_without_policies_only_if_all_of_them_allow_it(routes: PolicyRoutes) -> None:
    both, second = routes.plan_for(request("gpt-5")), routes.plan_for(request(policies=["two"]))
    assert both
    assert second
    assert (both.on_error, both.patience_ms) == ("block", 10_000)
    assert (second.on_error, second.patience_ms) == ("pass", 8_000)


def test_the_policies_of_every_possible_provider_judge_the_run_from_its_beginning(routes: PolicyRoutes) -> None:
    fallback = [Fallback(provider="openai-chat", model="gpt-5")]
    assert names(routes, request("claude-sonnet-4-6", fallback=fallback, policies=["three"])) == ("two", "one", "three")


def test_an_unconfigured_name_is_reported_with_its_place(routes: PolicyRoutes) -> None:
    with pytest.raises(RequestInvalid) as e:
        routes.plan_for(request(policies=["one", "nobody"]))
    assert e.value.where == "policies[1]"


def test_a_route_to_a_policy_that_is_not_there_is_an_error_of_the_settings(tmp_path: Path) -> None:
    path = tmp_path / "tokenbus.toml"
    path.write_text('[[policy_routes]]\npolicies = ["nobody"]\n')
    with pytest.raises(SettingsError, match="nobody"):
        load({"TOKENBUS_CONFIG": str(path)})


def test_a_fallback_to_a_provider_that_is_not_there_is_an_error_of_the_settings(tmp_path: Path) -> None:
    path = tmp_path / "tokenbus.toml"
    path.write_text('[[fallback_routes]]\nfallback = [{ provider = "nobody", model = "m" }]\n')
    with pytest.raises(SettingsError, match=r"fallback_routes\[0\].fallback\[0\].provider.*nobody"):
        load({"TOKENBUS_CONFIG": str(path)})
