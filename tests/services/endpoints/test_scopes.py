"""Which limits hold for which call."""

from __future__ import annotations

import pytest

from tokenbus.bus.keys import Keys
from tokenbus.bus.scripts.limits import Scope
from tokenbus.errors import SettingsError
from tokenbus_services import settings
from tokenbus_services.endpoints.limiter import Scopes
from tokenbus_services.settings import LimitSettings, ProviderRates, RateSettings

LIMITS = LimitSettings(
    providers={
        "limited": ProviderRates(
            requests_per_second=5,
            models={
                "big": RateSettings(concurrency=1),
                "big-*": RateSettings(concurrency=2),
                "big-and-new*": RateSettings(concurrency=3),
            },
        ),
        "polite": ProviderRates(),
    },
    tenant=RateSettings(concurrency=10),
    tenants={"gold": RateSettings(concurrency=100), "free of limits": RateSettings()},
)


def of(provider: str, model: str = "m", tenant: str = "free of limits") -> list[str]:
    return [scope.key for scope in Scopes(LIMITS, Keys("p")).of(provider, model, tenant)]


def test_without_limits_no_command_is_sent() -> None:
    assert Scopes(LimitSettings(), Keys()).of("anthropic", "m", "t") == ()


@pytest.mark.parametrize(
    ("model", "scope"), [("big", "big"), ("big-1", "big-*"), ("big-and-new-2", "big-and-new*"), ("bigger", "bigger")]
)
def test_a_models_own_name_goes_first_then_the_longest_beginning(model: str, scope: str) -> None:
    assert of("limited", model) == [f"p:{{limits}}:model:limited/{scope}", "p:{limits}:provider:limited"]


@pytest.mark.parametrize("model", ["big", "models/big", " BIG ", "publishers/x/models/Big"])
def test_no_spelling_of_a_models_name_has_a_limit_of_its_own(model: str) -> None:
    assert of("limited", model)[0] == "p:{limits}:model:limited/big"


def test_no_name_of_a_stranger_is_a_key_of_somebody_elses() -> None:
    keys = {*of("limited", "m:held"), *of("x", tenant="a:held"), *of("x", tenant="a%3Aheld")}
    assert not any(key.endswith(":held") for key in keys)
    assert len({*of("x", tenant="a:held"), *of("x", tenant="a%3Aheld")}) == 2


def test_a_provider_with_an_empty_table_has_a_scope_for_the_pauses_that_it_asks_for() -> None:
    assert of("polite") == ["p:{limits}:model:polite/m"]


def test_a_tenant_has_its_own_table_or_the_one_for_each() -> None:
    scopes = Scopes(LIMITS, Keys())
    assert [s.concurrency for s in scopes.of("x", "m", "gold")] == [100]
    assert [s.concurrency for s in scopes.of("x", "m", "somebody")] == [10]
    assert scopes.of("x", "m", "") == (Scope("tenant", "tokenbus:{limits}:tenant:", concurrency=10),)


def test_limits_of_a_provider_that_is_not_there_are_a_mistake(tmp_path: object) -> None:
    path = f"{tmp_path}/tokenbus.toml"
    with open(path, "w", encoding="utf-8") as file:
        file.write("[limits.providers.antropic]\nconcurrency = 3\n")
    with pytest.raises(SettingsError, match=r"limits\.providers\.antropic"):
        settings.load({"TOKENBUS_CONFIG": path})
