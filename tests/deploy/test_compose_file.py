"""compose.yaml, read as a file: limits, profiles, secrets and the needs of observability. tests/docker runs it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from tokenbus_services.cli import demo
from tokenbus_services.cli.service_registry import SERVICES, STOP_ORDER
from tokenbus_services.cli.up.command import STOP_GRACE_S
from tokenbus_services.cli.worker import times_to_stop
from tokenbus_services.settings import GatewaySettings, Settings, StageSettings

COMPOSE: dict[str, Any] = yaml.safe_load(Path("compose.yaml").read_text())
CONTAINERS: dict[str, dict[str, Any]] = COMPOSE["services"]
SECRETS: dict[str, Any] = yaml.safe_load(Path("deploy/docker/compose.secrets.yaml").read_text())
OBSERVABILITY = Path("deploy/observability")


def kubernetes_limits() -> dict[str, int]:
    """The memory of each service's pod, in MiB."""
    limits: dict[str, int] = {}
    for file in Path("deploy/kubernetes").rglob("*.yaml"):
        for each in cast("list[dict[str, Any] | None]", list(yaml.safe_load_all(file.read_text()))):
            if (
                each
                and each.get("kind") in ("Deployment", "StatefulSet")
                and each["metadata"]["name"] != "every-service"
            ):
                [only] = each["spec"]["template"]["spec"]["containers"]
                limits[each["metadata"]["name"]] = mebibytes(only["resources"]["limits"]["memory"])
    return limits


def mebibytes(text: str) -> int:
    found = re.fullmatch(r"(?:\$\{\w+:-)?(\d+)([gm])i?\}?", text.lower())
    assert found, text
    return int(found[1]) * (1024 if found[2] == "g" else 1)


def test_every_service_is_there_and_the_optional_ones_under_profiles_of_their_names() -> None:
    assert set(SERVICES) <= set(CONTAINERS)
    optional = {name: one["profiles"][0] for name, one in CONTAINERS.items() if "profiles" in one}
    watching = dict.fromkeys(("prometheus", "grafana", "otel-collector"), "observability")
    own = ("policy", "recorder", "webhooks", "gateway", "pipeline")
    assert optional == {**{name: name for name in own}, **watching}


def test_a_worker_that_exits_is_started_again() -> None:
    policies = {name: one.get("restart") for name, one in CONTAINERS.items()}
    assert policies == {name: "no" if name == "secrets" else "unless-stopped" for name in CONTAINERS}


def test_every_container_has_limits_of_cpu_memory_and_processes() -> None:
    for name, one in CONTAINERS.items():
        assert all(one.get(limit) for limit in ("cpus", "mem_limit", "pids_limit")), name


def test_the_memory_limits_are_those_of_kubernetes() -> None:
    limits = kubernetes_limits()
    assert set(limits) == {*SERVICES, "valkey"}
    assert {name: mebibytes(CONTAINERS[name]["mem_limit"]) for name in limits} == limits


def test_settings_and_modules_are_mounted() -> None:
    for name in SERVICES:
        assert any(volume.endswith(":/etc/tokenbus:ro") for volume in CONTAINERS[name]["volumes"]), name
        assert CONTAINERS[name]["environment"]["TOKENBUS_CONFIG"] == "/etc/tokenbus/tokenbus.toml"


def test_each_secret_is_a_file_and_provider_keys_go_to_what_calls_providers_alone() -> None:
    assert set(SECRETS["services"]) == set(SERVICES)
    for name, one in SECRETS["services"].items():
        files = {value for key, value in one["environment"].items() if key.endswith("_FILE")}
        assert files == {f"/run/secrets/{secret}" for secret in one["secrets"]}
        assert ("anthropic_api_key" in one["secrets"]) is (name in ("fetcher", "pipeline"))
    assert set(SECRETS["secrets"]) == {secret for one in SECRETS["services"].values() for secret in one["secrets"]}


def test_prometheus_finds_every_service_by_its_name() -> None:
    config = yaml.safe_load((OBSERVABILITY / "prometheus.yml").read_text())
    [job] = config["scrape_configs"]
    assert set(job["dns_sd_configs"][0]["names"]) == set(SERVICES)


@pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool here")
def test_promtool_accepts_the_configuration_with_the_rules() -> None:
    command = ["promtool", "check", "config", str(OBSERVABILITY / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout


def test_what_observability_mounts_is_there_and_grafana_finds_prometheus_and_the_dashboard() -> None:
    for name in ("prometheus", "grafana", "otel-collector"):
        for volume in CONTAINERS[name]["volumes"]:
            source = re.sub(r"^\$\{\w+:-(.*?)\}", r"\1", volume).partition(":")[0]
            assert not source.startswith(".") or Path(source).exists(), source
    [source] = yaml.safe_load((OBSERVABILITY / "grafana/datasources/prometheus.yaml").read_text())["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    [provider] = yaml.safe_load((OBSERVABILITY / "grafana/dashboards/tokenbus.yaml").read_text())["providers"]
    mounted = [volume.split(":")[1] for volume in CONTAINERS["grafana"]["volumes"]]
    assert f"{provider['options']['path']}/grafana-dashboard.json" in mounted
    assert json.loads((OBSERVABILITY / "grafana-dashboard.json").read_text())["title"] == "tokenbus"


def test_every_pipeline_of_the_collector_names_parts_that_it_has() -> None:
    config = yaml.safe_load((OBSERVABILITY / "otel-collector.yaml").read_text())
    for pipeline in config["service"]["pipelines"].values():
        for kind, names in pipeline.items():
            assert set(names) <= set(config[kind])


def test_whatever_stops_a_worker_waits_longer_than_the_worker_takes() -> None:
    """Of one deployment: `stages.drain_s`, Compose, Kubernetes, `tokenbus up` and the demo."""
    drain_s = StageSettings().drain_s
    patch = yaml.safe_load(Path("deploy/kubernetes/components/every-service/patch.yaml").read_text())
    kubernetes_s = patch["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    [gateway, *_] = yaml.safe_load_all(Path("deploy/kubernetes/components/gateway/gateway.yaml").read_text())
    [container] = gateway["spec"]["template"]["spec"]["containers"]
    before_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    waits = {CONTAINERS[name]["stop_grace_period"] for name in SERVICES}
    assert waits == {f"{kubernetes_s}s"}
    assert kubernetes_s - before_s >= drain_s + STOP_GRACE_S
    assert drain_s + STOP_GRACE_S <= demo.STOP_GRACE_S
    assert times_to_stop("gateway", Settings(gateway=GatewaySettings()))[0] == drain_s


def test_doors_and_fetchers_stop_before_the_services_behind_them() -> None:
    """Compose stops a container before those that it depends on; `tokenbus up` by its order."""
    order = {service: place for place, together in enumerate(STOP_ORDER) for service in together}
    assert set(order) == set(SERVICES)
    for name in ("gateway", "fetcher", "pipeline"):
        behind = set(CONTAINERS[name]["depends_on"]) & set(SERVICES)
        assert "blobs" in behind
        assert ("parser" in behind) is (name != "pipeline")
        assert all(order[name] < order[each] for each in behind)
