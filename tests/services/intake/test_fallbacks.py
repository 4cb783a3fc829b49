"""Whom a run asks when its provider fails, as its routes say."""

from __future__ import annotations

from tokenbus.events.requests import Fallback, Generate, Message
from tokenbus_services.endpoints.endpoint import Providers
from tokenbus_services.intake.usable_fallbacks import Fallbacks
from tokenbus_services.settings import FallbackChoice, FallbackRoute, ProviderSettings, Settings


def test_a_model_that_a_route_names_by_an_alias_has_its_true_name() -> None:
    aliased = ProviderSettings(api="openai-chat", model_aliases={"newest": "m-2"})
    providers = Providers(Settings(providers={"a": aliased, "b": ProviderSettings(api="anthropic")}), {})
    choices = [("a", " Newest"), ("b", "newest"), ("nobody", "newest"), ("a", "m-1")]
    route = FallbackRoute(fallback=tuple(FallbackChoice(provider=p, model=m) for p, m in choices))
    request = Generate(provider="a", model="m-1", messages=[Message(role="user", content="Hi")], max_tokens=9)
    settled, notes = Fallbacks((route,), providers.get).resolve(request)
    assert settled.fallback == [Fallback(provider="a", model="m-2"), Fallback(provider="b", model="newest")]
    assert len(notes) == 1, "no provider is configured, and the last one is called in any case"
