"""`tokenbus up --mock`: its gateway lists models that can be asked at once."""

from __future__ import annotations

from tokenbus_services.cli.mock import API_PATHS, with_mock
from tokenbus_services.gateway.app import model_table
from tokenbus_services.settings import GatewaySettings, Settings

URL = "http://127.0.0.1:9"


def test_the_gateway_lists_a_model_of_each_mock_provider() -> None:
    settings = with_mock(Settings(), URL)
    assert settings.gateway
    models = model_table(settings, settings.gateway)
    assert [models.resolve(name).api for name in models.names()] == list(API_PATHS)


def test_a_gateway_in_the_settings_is_not_changed() -> None:
    own = GatewaySettings(models=("anthropic/m",))
    assert with_mock(Settings(gateway=own), URL).gateway is own
