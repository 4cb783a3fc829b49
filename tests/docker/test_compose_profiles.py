"""compose.yaml with its profiles: a pipeline in place of three services, policies, records, the gateway, secrets."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from uuid import uuid4

import httpx
import msgspec
import pytest

from tests.docker.stack import Stack, docker, inspect
from tests.waiting import eventually_sync
from tokenbus_services.mock_provider.demo import DEMO_MODEL, DEMO_PROMPT
from tokenbus_services.process.embedded_server import free_port

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]

SERVICES = ("pipeline", "policy", "recorder", "gateway", "tools", "blobs")
KEYS = ("anthropic_api_key", "openai_api_key", "gemini_api_key", "blob_token", "gateway_admin_token")


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    directory = tmp_path / "secrets"
    directory.mkdir()
    for name in KEYS:
        (directory / name).write_text(f"a-secret-{name}\n")
    for path in (directory, *tmp_path.parents):
        if path.is_relative_to("/tmp") and path != Path("/tmp"):
            path.chmod(path.stat().st_mode | 0o055)  # user 10001 reads them
    return directory


@pytest.fixture
def stack(image: str, secrets: Path) -> Generator[Stack]:
    stack = Stack(
        f"tokenbus-test-{uuid4().hex[:8]}",
        ("deploy/docker/compose.secrets.yaml",),
        TOKENBUS_IMAGE=image,
        TOKENBUS_SETTINGS="./tests/docker/profiles/settings",
        TOKENBUS_SECRETS=str(secrets),
        GATEWAY_PORT=str(free_port()),
        COMPOSE_PROFILES="pipeline,policy,recorder,gateway",
    )
    try:
        stack.compose("up", "--detach", "--no-build", *SERVICES, "replay")
        eventually_sync(lambda: stack.ready(*SERVICES), timeout=120)
        yield stack
    finally:
        stack.compose("down", "--volumes")


def test_a_run_passes_pipeline_policy_and_recorder_and_a_new_token_is_used_at_once(stack: Stack, secrets: Path) -> None:
    found = msgspec.json.decode(stack.compose("exec", "-T", "pipeline", "tokenbus", "doctor", "--json"))
    at_work = ("pipeline", "policy", "recorder", "gateway", "tools", "blobs", "normalizer", "parser", "fetcher")
    assert {f["about"]: f["level"] for f in found if f["about"] in at_work} == dict.fromkeys(at_work, "ok")

    message = ("--provider", "anthropic", "--model", DEMO_MODEL, "--text", DEMO_PROMPT)
    lines = stack.compose("exec", "-T", "tools", "tokenbus", "send", *message, "--follow", "--json").splitlines()
    assert msgspec.json.decode(lines[-1])["type"] == "completed"
    run = msgspec.json.decode(lines[0])["run"]
    eventually_sync(lambda: run in stack.compose("exec", "-T", "tools", "tokenbus", "records", "--json"), timeout=60)

    for one in SERVICES:
        [container] = stack.containers(one)
        host = inspect(container)["HostConfig"]
        assert all(host[limit] > 0 for limit in ("Memory", "NanoCpus", "PidsLimit")), one
        given = docker("exec", container, "env")
        assert not any(f"a-secret-{name}" in given for name in KEYS), "in files alone"

    (secrets / "blob_token").write_text("another-token\n")

    def taken() -> bool:
        bearer = {"authorization": "Bearer another-token"}
        return httpx.put(f"{stack.blobs_url}/blobs", content=b"x", headers=bearer).status_code == 201

    eventually_sync(taken, timeout=30)
