"""The kustomization renders, and what it renders is what the API server and KEDA accept."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema_rs
import kubernetes_validate
import pytest
import yaml

from tokenbus_services.cli.service_registry import SERVICES

KUBERNETES = Path("deploy/kubernetes")
VERSIONS = ("1.34", "1.37")
"""The oldest version of Kubernetes that still has support, and the newest that there are schemas of."""
KEDA = jsonschema_rs.validator_for(json.loads(Path(__file__).with_name("keda_scaled_object.json").read_text()))
_PAIRS = {"type": "object", "additionalProperties": {"type": "string"}}
POD_MONITOR = jsonschema_rs.validator_for(
    {
        "type": "object",
        "required": ["apiVersion", "kind", "metadata", "spec"],
        "properties": {
            "apiVersion": {"const": "monitoring.coreos.com/v1"},
            "spec": {
                "type": "object",
                "required": ["selector", "podMetricsEndpoints"],
                "additionalProperties": False,
                "properties": {
                    "selector": {
                        "type": "object",
                        "additionalProperties": False,
                        "properties": {"matchLabels": _PAIRS},
                    },
                    "podMetricsEndpoints": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "additionalProperties": False,
                            "properties": {
                                "port": {"type": "string"},
                                "path": {"type": "string"},
                                "interval": {"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"},
                                "relabelings": {
                                    "type": "array",
                                    "items": {
                                        "type": "object",
                                        "additionalProperties": False,
                                        "properties": {
                                            "sourceLabels": {"type": "array", "items": {"type": "string"}},
                                            "targetLabel": {"type": "string"},
                                            "replacement": {"type": "string"},
                                        },
                                    },
                                },
                            },
                        },
                    },
                },
            },
        },
    }
)
"""The fields of a PodMonitor that are used here, as the operator's reference describes them."""
OPTIONAL = "  # - ../../components/"

pytestmark = pytest.mark.skipif(not shutil.which("kubectl"), reason="no kubectl here to render with")


def render(directory: Path) -> list[dict[str, Any]]:
    done = subprocess.run(["kubectl", "kustomize", str(directory)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """All objects, with each component that the overlay names."""
    copy = tmp_path_factory.mktemp("kubernetes") / "kubernetes"
    shutil.copytree(KUBERNETES, copy)
    overlay = copy / "overlays/one-namespace/kustomization.yaml"
    text = overlay.read_text()
    assert OPTIONAL in text
    overlay.write_text(text.replace(OPTIONAL, OPTIONAL.replace("# ", "")))
    return render(overlay.parent)


def accepted(each: dict[str, Any], version: str) -> None:
    """Raises if the API server of this version, KEDA or the Prometheus operator would refuse the object."""
    match each["kind"]:
        case "ScaledObject":
            KEDA.validate(each)
        case "PodMonitor":
            POD_MONITOR.validate(each)
        case _:
            kubernetes_validate.validate(each, version, strict=True)


def of_kind(objects: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in objects if each["kind"] == kind}


def container(deployment: dict[str, Any]) -> dict[str, Any]:
    return deployment["spec"]["template"]["spec"]["containers"][0]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_what_the_api_server_accepts(everything: list[dict[str, Any]], version: str) -> None:
    for each in everything:
        accepted(each, version)


def test_the_unchanged_overlay_has_a_server_and_no_optional_service() -> None:
    objects = render(KUBERNETES / "overlays/one-namespace")
    assert set(of_kind(objects, "Deployment")) == {"fetcher", "normalizer", "parser", "tools", "blobs"}
    assert set(of_kind(objects, "StatefulSet")) == {"valkey"}


def test_a_misspelt_field_is_found() -> None:
    broken = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "x"}, "spec": {"replica": 1}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[-1], strict=True)
    scaled = {"apiVersion": "keda.sh/v1alpha1", "kind": "ScaledObject", "metadata": {}, "spec": {"scaleTarget": {}}}
    with pytest.raises(jsonschema_rs.ValidationError):
        KEDA.validate(scaled)


def test_each_service_has_a_deployment_of_its_own_command(everything: list[dict[str, Any]]) -> None:
    deployments = of_kind(everything, "Deployment")
    for name, deployment in deployments.items():
        assert name in SERVICES
        assert container(deployment)["args"][:2] == ["worker", name]
    assert set(of_kind(everything, "PodDisruptionBudget")) == set(deployments) - {"blobs"}


def test_every_pod_is_probed_bounded_and_without_rights(everything: list[dict[str, Any]]) -> None:
    for deployment in of_kind(everything, "Deployment").values():
        pod, only = deployment["spec"]["template"]["spec"], container(deployment)
        assert only["livenessProbe"]["httpGet"]["path"] == "/health"
        assert only["readinessProbe"]["httpGet"]["path"] == "/ready"
        assert pod.get("restartPolicy", "Always") == "Always"  # a worker that cannot continue exits
        assert {"cpu", "memory"} <= set(only["resources"]["requests"])
        assert "memory" in only["resources"]["limits"]
        assert only["securityContext"]["readOnlyRootFilesystem"]
        assert only["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert pod["securityContext"]["runAsNonRoot"]
        assert not pod["automountServiceAccountToken"]


def test_what_a_pod_mounts_and_reads_is_there(everything: list[dict[str, Any]]) -> None:
    maps = set(of_kind(everything, "ConfigMap"))
    for deployment in of_kind(everything, "Deployment").values():
        pod, only = deployment["spec"]["template"]["spec"], container(deployment)
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert {mount["name"] for mount in only["volumeMounts"]} <= set(volumes)
        named = {volume["configMap"]["name"] for volume in volumes.values() if "configMap" in volume}
        sources = [variable["valueFrom"] for variable in only["env"] if "valueFrom" in variable]
        named |= {source["configMapKeyRef"]["name"] for source in sources if "configMapKeyRef" in source}
        assert len(named) == 2
        assert named <= maps


def test_provider_keys_reach_only_what_calls_providers_and_as_files(everything: list[dict[str, Any]]) -> None:
    having = {
        name
        for name, deployment in of_kind(everything, "Deployment").items()
        if "tokenbus-provider-keys" in json.dumps(deployment)
    }
    assert having == {"fetcher", "pipeline"}
    for name in having:
        only = container(of_kind(everything, "Deployment")[name])
        [folder] = [mount["mountPath"] for mount in only["volumeMounts"] if mount["name"] == "provider-keys"]
        files = [variable["value"] for variable in only["env"] if variable["name"].endswith("_API_KEY_FILE")]
        assert len(files) == 3
        assert all(file.startswith(f"{folder}/") for file in files)


def test_pipelines_replace_the_three_services_that_they_contain(everything: list[dict[str, Any]]) -> None:
    deployments = of_kind(everything, "Deployment")
    replicas = {name: deployment["spec"]["replicas"] for name, deployment in deployments.items()}
    assert {replicas[name] for name in ("fetcher", "normalizer", "parser")} == {0}
    assert replicas["pipeline"] > 0
    [internet] = [
        policy
        for name, policy in of_kind(everything, "NetworkPolicy").items()
        if "pipeline" in json.dumps(policy["spec"]["podSelector"])
    ]
    assert "Egress" in internet["spec"]["policyTypes"]


def test_a_stage_is_never_scaled_beyond_its_partitions(everything: list[dict[str, Any]]) -> None:
    deployment = next(
        m for name, m in of_kind(everything, "ConfigMap").items() if name.startswith("tokenbus-deployment")
    )
    partitions = int(deployment["data"]["TOKENBUS_PARTITIONS"])
    scaled = of_kind(everything, "ScaledObject")
    assert set(scaled) <= set(of_kind(everything, "Deployment"))
    for stage in ("normalizer", "parser"):
        assert scaled[stage]["spec"]["maxReplicaCount"] == partitions


def test_a_stage_is_spread_by_itself(everything: list[dict[str, Any]]) -> None:
    for deployment in of_kind(everything, "Deployment").values():
        [spread] = deployment["spec"]["template"]["spec"]["topologySpreadConstraints"]
        assert spread["matchLabelKeys"] == ["app.kubernetes.io/component"]


def test_what_has_a_service_for_clients_is_called_until_every_node_knows_that_it_leaves(
    everything: list[dict[str, Any]],
) -> None:
    called = {name for name in of_kind(everything, "Service") if not name.endswith("-metrics")} - {"valkey"}
    waiting = {
        name for name, each in of_kind(everything, "Deployment").items() if "preStop" in json.dumps(container(each))
    }
    assert called == waiting == {"gateway", "blobs"}


def test_scaling_takes_no_gap_in_metrics_for_a_zero_and_no_run_that_waits_for_work(
    everything: list[dict[str, Any]],
) -> None:
    for name, scaled in of_kind(everything, "ScaledObject").items():
        assert scaled["spec"]["fallback"]["behavior"] == "currentReplicasIfHigher", name
        for trigger in scaled["spec"]["triggers"]:
            assert trigger["metadata"]["ignoreNullValues"] == "false", name
            assert "waiting" not in trigger["metadata"]["query"], name


def test_every_service_has_a_place_where_its_metrics_are(everything: list[dict[str, Any]]) -> None:
    services = of_kind(everything, "Service").values()
    selected = {each["spec"]["selector"].get("app.kubernetes.io/component") for each in services}
    assert selected >= set(of_kind(everything, "Deployment"))
    [monitor] = of_kind(everything, "PodMonitor").values()
    assert monitor["spec"]["selector"]["matchLabels"] == {"app.kubernetes.io/part-of": "tokenbus"}


def test_each_service_logs_in_as_its_own_user_and_sees_its_own_password_alone(
    everything: list[dict[str, Any]],
) -> None:
    users = set(re.findall(r"^user tokenbus-(\S+)", Path("deploy/acl/users.conf").read_text(), re.MULTILINE))
    for name, deployment in of_kind(everything, "Deployment").items():
        only = container(deployment)
        variables = {variable["name"]: variable for variable in only["env"]}
        names = list(variables)
        assert name in users
        assert variables["TOKENBUS_REDIS_URL"]["value"] == "redis://tokenbus-$(SERVICE)@$(SERVER)"
        assert max(names.index("SERVICE"), names.index("SERVER")) < names.index("TOKENBUS_REDIS_URL")
        assert "TOKENBUS_REDIS_PASSWORD" not in variables
        [mount] = [each for each in only["volumeMounts"] if each["name"] == "server-users"]
        assert mount["subPathExpr"] == "$(SERVICE)"
        assert mount["mountPath"] == variables["TOKENBUS_REDIS_PASSWORD_FILE"]["value"]
