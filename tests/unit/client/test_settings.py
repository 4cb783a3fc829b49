"""What a client takes from its environment, and what it says when that is wrong."""

from __future__ import annotations

import pytest

from tokenbus.client.client import Client
from tokenbus.client.deployment import partitions_in, url_in
from tokenbus.errors import SettingsError


def test_a_client_without_a_url_anywhere_says_which_variable_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TOKENBUS_REDIS_URL", raising=False)
    with pytest.raises(SettingsError, match="environment: TOKENBUS_REDIS_URL: not set"):
        Client()


def test_the_url_comes_from_the_environment():
    assert url_in({"TOKENBUS_REDIS_URL": "redis://h"}) == "redis://h"


@pytest.mark.parametrize("env", [{}, {"TOKENBUS_PARTITIONS": ""}])
def test_unset_partitions_are_the_deployments(env: dict[str, str]):
    assert partitions_in(env) is None


def test_partitions_come_from_the_environment():
    assert partitions_in({"TOKENBUS_PARTITIONS": "16"}) == 16


@pytest.mark.parametrize("text", ["0", "4097", "-1", "eight", "8.0", "²"])
def test_impossible_partitions_are_refused(text: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TOKENBUS_PARTITIONS", text)
    with pytest.raises(SettingsError, match=r"(?i)partitions"):
        Client("redis://h")


def test_an_impossible_prefix_is_refused():
    with pytest.raises(SettingsError, match="prefix"):
        Client("redis://h", prefix="a{b}")
