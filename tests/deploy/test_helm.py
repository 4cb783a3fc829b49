"""The Helm chart renders, with Helm itself, the objects that the kustomization renders."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.test_kubernetes import KUBERNETES, OPTIONAL, VERSIONS, accepted, container, of_kind, render
from tokenbus import __version__

CHART = Path("deploy/helm")
MAPS = ("tokenbus-settings", "tokenbus-deployment", "valkey-scripts")
"""Kustomize adds a hash of their content to their names."""
EVERYTHING = {
    **{name: {"enabled": True} for name in ("gateway", "pipeline", "policy", "recorder", "webhooks", "monitoring")},
    "server": {"users": "valkey:6379"},
}
if not find_spec("helm_python"):
    pytest.skip("Helm's library is not installed", allow_module_level=True)
HELM = """
import json, sys
import helm_python as helm
what, where, given = json.load(sys.stdin)
if what == "render":
    with helm.Chart.load(where) as chart:
        print(json.dumps(list(chart.render(given, name="tokenbus", namespace="tokenbus").values())))
elif what == "package":
    print(json.dumps(helm.package(where, destination=given)))
else:
    print(json.dumps(helm.lint(where)["errors"]))
"""
"""In a process of its own: the library is Go's, whose threads do not survive the fork of a test's process."""


def helm(what: str, where: Path, given: object = None) -> Any:
    """What Helm prints; raises AssertionError with its words if it fails."""
    order = json.dumps([what, str(where), given])
    done = subprocess.run(
        [sys.executable, "-c", HELM], input=order, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def chart(values: dict[str, Any] | None = None, *, packed: Path = CHART) -> list[dict[str, Any]]:
    return [each for text in helm("render", packed, values or {}) for each in yaml.safe_load_all(text) if each]


def comparable(objects: list[dict[str, Any]]) -> dict[tuple[str, str], Any]:
    """Objects by kind and name, without namespace, image and hashes of settings; lists of what has a name are sets."""
    found: dict[tuple[str, str], Any] = {}
    names = {each["metadata"]["name"] for each in objects if each["kind"] == "ConfigMap"}
    plain = {name: next(each for each in MAPS if name.startswith(each)) for name in names}
    for each in objects:
        if each["kind"] == "Namespace":
            continue
        each["metadata"].pop("namespace", None)
        if each["kind"] == "ConfigMap":
            each["metadata"]["name"] = plain[each["metadata"]["name"]]
        if each["kind"] == "Deployment":
            template = each["spec"]["template"]
            template["metadata"].pop("annotations", None)
            container(each)["image"] = "tokenbus"
        found[each["kind"], each["metadata"]["name"]] = _unordered(each, plain)
    return found


def _unordered(value: Any, plain: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {name: _unordered(each, plain) for name, each in value.items()}
    if isinstance(value, list):
        parts = [_unordered(each, plain) for each in value]
        named = all(isinstance(each, dict) and "name" in each for each in parts)
        return sorted(parts, key=lambda each: str(each["name"]) + str(each.get("mountPath"))) if named else parts
    return plain.get(value, value) if isinstance(value, str) else value


@pytest.mark.skipif(not shutil.which("kubectl"), reason="no kubectl here to render with")
def test_the_chart_s_defaults_are_the_overlay_as_it_is() -> None:
    assert comparable(chart()) == comparable(render(KUBERNETES / "overlays/one-namespace"))


@pytest.mark.skipif(not shutil.which("kubectl"), reason="no kubectl here to render with")
def test_the_chart_with_everything_is_the_overlay_with_every_component(tmp_path: Path) -> None:
    shutil.copytree(KUBERNETES, tmp_path / "kubernetes")
    overlay = tmp_path / "kubernetes/overlays/one-namespace/kustomization.yaml"
    text = overlay.read_text().replace(OPTIONAL, OPTIONAL.replace("# ", ""))
    overlay.write_text(text.replace("  - ../../components/keda\n", ""))
    assert comparable(chart(EVERYTHING)) == comparable(render(overlay.parent))


@pytest.mark.parametrize("version", VERSIONS)
def test_what_the_chart_renders_is_what_the_api_server_accepts(version: str) -> None:
    without = {**EVERYTHING, "pipeline": {"enabled": False}, "keda": {"enabled": True}}
    for values in (None, EVERYTHING, without):
        for each in chart(values):
            accepted(each, version)


def test_a_managed_server_is_one_line_and_leaves_valkey_out() -> None:
    objects = chart({"server": {"url": "rediss://managed.example:6379?ssl_ca_certs=/run/server-ca/ca.crt"}})
    assert not of_kind(objects, "StatefulSet")
    assert not {name for name in of_kind(objects, "NetworkPolicy") if name == "valkey"}
    assert "managed.example" in of_kind(objects, "ConfigMap")["tokenbus-deployment"]["data"]["TOKENBUS_REDIS_URL"]


def test_partitions_bound_the_scaling_of_stages_and_a_service_takes_what_is_its_own() -> None:
    resources = {"requests": {"cpu": "2", "memory": "1Gi"}, "limits": {"memory": "4Gi"}}
    values = {
        "partitions": 32,
        "keda": {"enabled": True, "prometheus": "http://prometheus.monitoring:9090"},
        "services": {"parser": {"replicas": 5, "resources": resources, "nodeSelector": {"pool": "bus"}}},
        "image": {"repository": "registry.example/tokenbus", "tag": "1.2.3"},
    }
    objects = chart(values)
    scaled = of_kind(objects, "ScaledObject")
    assert {scaled[name]["spec"]["maxReplicaCount"] for name in ("normalizer", "parser")} == {32}
    assert {
        trigger["metadata"]["serverAddress"] for each in scaled.values() for trigger in each["spec"]["triggers"]
    } == {"http://prometheus.monitoring:9090"}
    parser = of_kind(objects, "Deployment")["parser"]
    assert parser["spec"]["replicas"] == 5
    assert container(parser)["resources"] == resources
    assert parser["spec"]["template"]["spec"]["nodeSelector"] == {"pool": "bus"}
    assert {container(each)["image"] for each in of_kind(objects, "Deployment").values()} == {
        "registry.example/tokenbus:1.2.3"
    }


def test_the_chart_is_of_the_release_whose_image_it_names() -> None:
    described = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert described["version"] == described["appVersion"] == __version__.partition(".dev")[0]


def test_a_change_of_the_settings_replaces_the_pods() -> None:
    def stamps(settings: str) -> set[str]:
        objects = chart({"settings": settings})
        return {
            each["spec"]["template"]["metadata"]["annotations"]["tokenbus.io/settings"]
            for each in of_kind(objects, "Deployment").values()
        }

    assert len(stamps("[blobs]\n") | stamps("[blobs]\nttl_s = 60\n")) == 2


def test_scaling_by_load_and_pipelines_together_are_refused() -> None:
    with pytest.raises(AssertionError, match="enable one of the two"):
        chart({"pipeline": {"enabled": True}, "keda": {"enabled": True}})


def test_helm_packages_the_chart_with_the_files_that_it_renders(tmp_path: Path) -> None:
    packed = helm("package", CHART, str(tmp_path))
    listed = subprocess.run(["tar", "tzf", packed], capture_output=True, text=True, check=True).stdout
    assert "tokenbus/kubernetes/base/fetcher.yaml" in listed
    assert of_kind(chart(packed=packed), "Deployment")
    assert helm("lint", CHART) == []
