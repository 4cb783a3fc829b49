"""What doctor makes of the facts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tokenbus.bus.keys import WIRE_VERSION
from tokenbus.bus.server import ServerInfo
from tokenbus_services.cli import checks
from tokenbus_services.cli.checks import DeadFacts, Finding, LeaseFacts, QueueFacts, StageFacts
from tokenbus_services.settings import ProviderSettings, Settings, load

INFO = ServerInfo(name="valkey", version=(9, 1, 0), eviction="noeviction")
QUEUE = QueueFacts(name="intake", service="fetcher", workers=1, waiting=0, held=0, stuck=0)


def test_a_sound_server_gives_one_good_finding():
    [finding] = checks.check_server("redis://h:1", INFO, persistent=True)
    assert finding == Finding(level="ok", about="server", says="valkey 9.1.0 at redis://h:1")


def test_eviction_is_wrong_and_no_persistence_a_note():
    info = msgspec.structs.replace(INFO, eviction="allkeys-lru")
    levels = {f.about: f.level for f in checks.check_server("redis://h:1", info, persistent=False)}
    assert levels == {"server": "ok", "eviction": "wrong", "persistence": "note"}


def test_a_server_that_does_not_tell_of_persistence_is_not_blamed():
    assert [f.about for f in checks.check_server("redis://h:1", INFO, persistent=None)] == ["server"]


def test_a_deployment_must_be_there_and_agree():
    settings = Settings()
    agreed = {"partitions": "8", "wire_version": str(WIRE_VERSION)}
    assert [f.level for f in checks.check_deployment(settings, agreed)] == ["ok"]
    [nothing] = checks.check_deployment(settings, {})
    assert nothing.level == "wrong"
    [other] = checks.check_deployment(settings, {**agreed, "partitions": "16"})
    assert (other.level, "16" in other.says) == ("wrong", True)


@pytest.mark.parametrize(
    ("leases", "level", "says"),
    [
        ([LeaseFacts(owned=True, lag_entries=2), LeaseFacts(owned=True)], "ok", "2 entries"),
        ([LeaseFacts(owned=True), LeaseFacts(owned=False)], "wrong", "nobody owns partition 1"),
        (
            [LeaseFacts(owned=True, lag_bytes=100), LeaseFacts(owned=True)],
            "wrong",
            "partition 0 is more than 100 bytes",
        ),
    ],
)
def test_a_stage_needs_an_owner_for_each_partition_and_must_keep_up(leases: list[LeaseFacts], level: str, says: str):
    finding = checks.check_stage(StageFacts(name="parser", workers=1, leases=leases), lag_limit=100)
    assert finding.level == level
    assert says in finding.says
    assert (finding.todo is None) == (level == "ok")


@pytest.mark.parametrize(
    ("changes", "level"),
    [
        ({}, "ok"),
        ({"held": 3, "waiting": 2}, "ok"),
        ({"workers": 0}, "wrong"),
        ({"held": 3, "stuck": 1}, "wrong"),
        ({"workers": None}, "note"),
        ({"workers": None, "waiting": 1}, "wrong"),
    ],
)
def test_a_queue_needs_workers_that_keep_what_they_hold_alive(changes: dict[str, Any], level: str):
    assert checks.check_queue(msgspec.structs.replace(QUEUE, **changes)).level == level


def test_an_inbound_stream_near_its_bound_is_wrong():
    assert list(checks.check_room(79, bound=100)) == []
    assert [f.level for f in checks.check_room(80, bound=100)] == ["wrong"]


def test_dead_entries_are_a_note_with_the_newest_reason():
    assert list(checks.check_dead(DeadFacts(entries=0), key="tokenbus:dead")) == []
    [finding] = checks.check_dead(DeadFacts(entries=2, newest="intake: no JSON"), key="tokenbus:dead")
    assert finding.level == "note"
    assert "intake: no JSON" in finding.says


def test_keys_are_told_by_variable_and_never_by_value():
    settings = load({})
    env = {"ANTHROPIC_API_KEY": "sk-secret"}
    findings = {f.about: f for f in checks.check_providers(settings, env)}
    assert findings["provider anthropic"].level == "ok"
    assert findings["provider openai-chat"].level == "note", "there by default, and perhaps not meant"
    assert "sk-secret" not in str(findings)


def test_a_provider_that_the_settings_name_must_have_its_key_and_its_api():
    mine = ProviderSettings(api="anthropic", api_key_env="MY_KEY")
    settings = Settings(providers={"mine": mine, "free": ProviderSettings(api="openai-chat", api_key_env="")})
    findings = {f.about: f for f in checks.check_providers(settings, {})}
    assert (findings["provider mine"].level, "MY_KEY" in findings["provider mine"].says) == ("wrong", True)
    assert findings["provider free"].level == "ok"


def test_notes_are_no_reason_to_fail():
    ok, note, wrong = (Finding(level=level, about="x", says="y") for level in ("ok", "note", "wrong"))
    assert checks.all_well([ok, note])
    assert not checks.all_well([ok, wrong])
