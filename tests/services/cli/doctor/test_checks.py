"""What doctor makes of the facts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tokenbus.bus.dead_letters import DeadLetter, StoredDeadLetter
from tokenbus.bus.keys import WIRE_VERSION
from tokenbus.bus.server.server import ServerInfo
from tokenbus_services.cli.doctor import checks, checks_work
from tokenbus_services.cli.doctor import examine_bus as examine_outside
from tokenbus_services.cli.doctor.checks import Finding
from tokenbus_services.cli.doctor.checks_work import StuckFacts
from tokenbus_services.cli.doctor.examine_bus import LITTLE_ROOM
from tokenbus_services.runtime.deployment_snapshot import (
    REPLICAS,
    DeploymentSnapshot,
    NodeFacts,
    PartitionFacts,
    QueueFacts,
    StageFacts,
    StreamFacts,
)
from tokenbus_services.runtime.mcp_tool_cache import TTL_S
from tokenbus_services.settings import DEFAULT_PROVIDERS, ProviderSettings, Settings, load

INFO = ServerInfo(name="valkey", version=(9, 1, 0), eviction="noeviction")


def test_a_sound_server_gives_one_good_finding():
    [finding] = checks.check_server("redis://h:1", INFO, persistent=True)
    assert finding == Finding(level="ok", about="server", says="valkey 9.1.0 at redis://h:1")


def test_eviction_is_wrong_and_no_persistence_a_note():
    info = msgspec.structs.replace(INFO, eviction="allkeys-lru")
    levels = {f.about: f.level for f in checks.check_server("redis://h:1", info, persistent=False)}
    assert levels == {"server": "ok", "eviction": "wrong", "persistence": "note"}


def test_a_server_that_takes_values_larger_than_a_worker_reads_gets_a_note():
    [_, large] = checks.check_server("redis://h:1", INFO, persistent=True, value_bytes=512 * 2**20)
    assert (large.level, large.todo) == ("note", "set proto-max-bulk-len 96mb on the server")
    assert len(list(checks.check_server("redis://h:1", INFO, persistent=True, value_bytes=96 * 2**20))) == 1


def test_a_server_that_reports_no_persistence_is_not_a_finding():
    assert [f.about for f in checks.check_server("redis://h:1", INFO, persistent=None)] == ["server"]


def test_a_deployment_must_be_there_and_agree():
    settings = Settings()
    agreed = {"partitions": "8", "wire_version": str(WIRE_VERSION)}
    assert [f.level for f in checks.check_deployment(settings, agreed)] == ["ok"]
    [nothing] = checks.check_deployment(settings, {})
    assert nothing.level == "wrong"
    [other] = checks.check_deployment(settings, {**agreed, "partitions": "16"})
    assert (other.level, "16" in other.says) == ("wrong", True)


NODE = NodeFacts(name="h:1", memory_bytes=10, memory_limit=100, commands_per_s=1, clients=1, now_ms=1_700_000_000_000)


@pytest.mark.parametrize(
    ("changes", "about"),
    [
        ({}, None),
        ({"memory_bytes": 80}, "memory"),
        ({"memory_bytes": 10**12, "memory_limit": 0}, None),
        ({"disk": {"rdb_last_bgsave_status": "err"}}, "disk"),
        ({"gauges": {REPLICAS: 1.0}}, "replicas"),
        ({"gauges": {REPLICAS: 2.0}}, None),
        ({"now_ms": NODE.now_ms + 2_001}, "clock"),
        ({"now_ms": NODE.now_ms - 2_001}, "clock"),
    ],
)
def test_a_node_is_judged_by_its_memory_its_disk_its_replicas_and_its_clock(changes: dict[str, Any], about: str | None):
    found = list(checks.check_node(msgspec.structs.replace(NODE, **changes), here_ms=NODE.now_ms, replicas=2))
    assert [f.about for f in found] == ([about] if about else [])
    assert all(f.level == "wrong" and f.todo for f in found)


def test_missing_rights_are_reported_in_the_servers_words():
    assert list(checks.check_rights("u", [])) == []
    [finding] = checks.check_rights("u", ["no 'xadd'", "no 'eval'"])
    assert finding.level == "note", "the user of these settings may be one who only looks"
    assert "no 'xadd' (and 1 more)" in finding.says


def stage(*partitions: PartitionFacts, workers: int = 1) -> StageFacts:
    return StageFacts(name="parser", ages_ms={f"w{n}": 0 for n in range(workers)}, partitions=list(partitions))


OWNED = PartitionFacts(owner="w")


@pytest.mark.parametrize(
    ("now", "level", "says"),
    [
        (stage(PartitionFacts(owner="w", lag_entries=2), OWNED), "ok", "2 entries"),
        (stage(OWNED, workers=3), "ok", "2 of them idle"),
        (stage(OWNED, PartitionFacts()), "wrong", "no worker owns partition 1"),
        (stage(PartitionFacts(owner="w", lag_bytes=100), OWNED), "wrong", "partition 0 is more than 100 B"),
        (stage(PartitionFacts(owner="w", lag_bytes=50), OWNED), "note", "partition 0 falls further behind"),
        (stage(PartitionFacts(owner="w", lag_bytes=9), OWNED), "ok", "9 B behind"),
    ],
)
def test_a_stage_needs_an_owner_for_each_partition_and_must_keep_up(now: StageFacts, level: str, says: str):
    earlier = stage(*(msgspec.structs.replace(p, lag_bytes=0) for p in now.partitions))
    finding = checks_work.check_stage(now, earlier, lag_limit=100)
    assert finding.level == level
    assert says in finding.says
    assert (finding.todo is None) == (level == "ok")


def test_without_any_worker_the_server_is_mended_first_if_it_takes_no_writes():
    idle = DeploymentSnapshot(at_ms=0, stages=[stage(OWNED, workers=0)], queues=[])
    [down], [hidden] = (list(checks_work.check_any_worker(idle, writes_fail=fail)) for fail in (False, True))
    assert "tokenbus up" in (down.todo or "")
    assert "heartbeats" in hidden.says
    assert "fix the server" in (hidden.todo or "")
    at_work = msgspec.structs.replace(idle, stages=[stage(OWNED)])
    assert not list(checks_work.check_any_worker(at_work, writes_fail=True))


def test_a_lag_that_shrinks_is_well():
    behind, less = (stage(PartitionFacts(owner="w", lag_bytes=n)) for n in (90, 80))
    assert checks_work.check_stage(less, behind, lag_limit=100).level == "ok"


@pytest.mark.parametrize(
    ("lag", "meant", "says"),
    [(0, False, None), (0, True, "no policy worker runs"), (9, False, "9 B of drafts wait, and no policy worker runs")],
)
def test_a_missing_policy_worker_is_reported_if_drafts_wait_or_settings_have_policies(
    lag: int, meant: bool, says: str | None
):
    found = list(checks_work.check_no_policy_worker(stage(PartitionFacts(lag_bytes=lag), workers=0), meant=meant))
    assert [(f.level, says is not None and f.says.startswith(says)) for f in found] == (
        [("wrong", True)] if says else []
    )


@pytest.mark.parametrize(
    ("changes", "stuck", "levels"),
    [
        ({}, {}, ["ok"]),
        ({"held": 3, "waiting": 2}, {}, ["ok"]),
        ({"workers": {}}, {}, ["wrong"]),
        ({"held": 3}, {"abandoned": 1}, ["wrong"]),
        ({"held": 3}, {"often": 1, "example": "s 1-0"}, ["ok", "wrong"]),
    ],
)
def test_a_queue_needs_workers_that_survive_their_entries(
    changes: dict[str, Any], stuck: dict[str, Any], levels: list[str]
):
    counts = {name: value for name, value in changes.items() if name != "workers"}
    ages_ms = changes.get("workers", {"w": 0})
    queue = QueueFacts(name="intake", ages_ms=ages_ms, streams=[StreamFacts(**counts)])
    assert [f.level for f in checks_work.check_queue(queue, StuckFacts(**stuck))] == levels


@pytest.mark.parametrize(("waiting", "level"), [(0, "ok"), (1, "wrong")])
def test_a_queue_without_workers_is_right_if_the_settings_need_none_and_nothing_waits(waiting: int, level: str):
    queue = QueueFacts(name="intake", streams=[StreamFacts(waiting=waiting)])
    assert [f.level for f in checks_work.check_queue(queue, StuckFacts(), needed=False)] == [level]


def test_an_inbound_stream_near_its_bound_is_wrong():
    assert list(checks_work.check_room(79, bound=100)) == []
    assert [f.level for f in checks_work.check_room(80, bound=100)] == ["wrong"]


def test_dead_entries_are_a_note_with_the_newest_reason():
    assert list(checks_work.check_dead(0, [])) == []
    newest = StoredDeadLetter("5-0", DeadLetter(reason="no JSON", stage="intake", stream="s", entry="1-0", bytes=b""))
    [finding] = checks_work.check_dead(2, [newest])
    assert finding.level == "note"
    assert "5-0 of intake: no JSON" in finding.says


@pytest.mark.parametrize(("left_s", "level"), [(None, "wrong"), (TTL_S - 10, "ok"), (20, "note")])
def test_what_an_mcp_server_lists_must_be_fresh(left_s: int | None, level: str):
    assert checks_work.check_listing("files", left_s).level == level


def test_a_nearly_full_disk_is_reported_as_wrong():
    assert list(examine_outside.check_disk("/data", free_bytes=LITTLE_ROOM)) == []
    [finding] = examine_outside.check_disk("/data", free_bytes=LITTLE_ROOM - 1)
    assert (finding.level, "/data" in finding.says) == ("wrong", True)


def test_a_provider_that_gives_no_answer_is_named_with_its_address():
    assert checks_work.check_reach("p", "https://h", problem=None).level == "ok"
    finding = checks_work.check_reach("p", "https://h", problem="refused")
    assert (finding.level, finding.says) == ("wrong", "no answer from https://h: refused")


def test_keys_are_reported_by_variable_and_never_by_value():
    settings = load({})
    env = {"ANTHROPIC_API_KEY": "sk-secret"}
    findings = {f.about: f for f in checks_work.check_providers(settings, env)}
    assert findings["provider anthropic"].level == "ok"
    assert findings["provider openai-chat"].level == "note", "there by default, and perhaps not meant"
    assert "sk-secret" not in str(findings)


def test_a_file_for_a_key_that_is_not_there_is_wrong_only_for_a_provider_that_the_settings_name(tmp_path: Path) -> None:
    (tmp_path / "anthropic").write_text("sk-ant-key")
    (tmp_path / "empty").write_text("")
    env = {
        "ANTHROPIC_API_KEY_FILE": str(tmp_path / "anthropic"),
        "OPENAI_API_KEY_FILE": str(tmp_path / "none"),
        "GEMINI_API_KEY_FILE": str(tmp_path / "empty"),
        "MINE_FILE": str(tmp_path / "none"),
    }
    mine = ProviderSettings(api="openai-chat", api_key_env="MINE")
    settings = Settings(providers={**DEFAULT_PROVIDERS, "mine": mine})
    levels = {f.about.removeprefix("provider "): f.level for f in checks_work.check_providers(settings, env)}
    assert levels["anthropic"] == "ok"
    assert levels["openai-chat"] == levels["openai-responses"] == "note"
    assert levels["gemini"] == levels["mine"] == "wrong"


def test_a_provider_that_the_settings_name_must_have_its_key_and_its_api():
    mine = ProviderSettings(api="anthropic", api_key_env="MY_KEY")
    settings = Settings(providers={"mine": mine, "free": ProviderSettings(api="openai-chat", api_key_env="")})
    findings = {f.about: f for f in checks_work.check_providers(settings, {})}
    assert (findings["provider mine"].level, "MY_KEY" in findings["provider mine"].says) == ("wrong", True)
    assert findings["provider free"].level == "ok"


def test_notes_are_no_reason_to_fail():
    ok, note, wrong = (Finding(level=level, about="x", says="y") for level in ("ok", "note", "wrong"))
    assert checks.none_wrong([ok, note])
    assert not checks.none_wrong([ok, wrong])
