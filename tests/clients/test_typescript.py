"""clients/typescript: its types are those of the events, it type-checks strictly, and works on the running bus."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import redis

from tests.clients import node
from tokenbus.bus.keys import Keys
from tokenbus.testing import Delivery, LocalBus, Reply, Stall, Status, Turn

USERS = Path(__file__).parents[2] / "deploy" / "acl" / "users.conf"
TEXT = "Yes, take it along. It should be dry from six in the evening on. 🌤️ Then you may go without."
RUNS = [f"run-{n}" for n in range(12)] + ["Zürich".encode().hex(), "a:b@c~d+e=f"]


def as_user(url: str, name: str) -> str:
    """The url under which a user of deploy/acl, made here, logs in."""
    (rules,) = re.findall(rf"^user {name} (.+)$", USERS.read_text(), re.MULTILINE)
    with closing(redis.Redis.from_url(url)) as server:
        # Redis 7.0 does not know that one, and a client bears its refusal.
        known = [rule for rule in rules.split() if rule != "+client|setinfo"]
        server.execute_command("ACL", "SETUSER", name, ">secret", *known)
    return url.replace("//", f"//{name}:secret@")


def test_the_schema_and_the_types_are_those_of_the_code() -> None:
    script = node.PACKAGE / "scripts" / "generate_types.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_lock_names_no_registry() -> None:
    lock = json.loads((node.PACKAGE / "package-lock.json").read_text())
    assert not [name for name, package in lock["packages"].items() if "resolved" in package]


def test_the_client_and_its_readme_compile_and_it_works_on_the_running_bus(tmp_path: Path) -> None:
    project = node.project(tmp_path)
    (readme,) = re.findall(r"```ts\n(.*?)```", (node.PACKAGE / "README.md").read_text(), re.DOTALL)
    (project / "test" / "readme.ts").write_text(readme.replace("@tokenbus/client", "../src/index.js"))
    compiled = node.run("node_modules/typescript/bin/tsc", cwd=project)
    assert compiled.returncode == 0, compiled.stdout
    answer = Reply(thinking="Hm.", text=TEXT, chunk_size=7)
    with LocalBus() as local:
        local.model_says("greeter", answer)
        local.model_says("paced", Turn(says=answer, delivery=Delivery(delay_s=0.02)))
        local.model_says("busy", Turn(says=answer, first=(Status(status=529),)))
        local.model_says("stalled", Turn(says=answer, fault=Stall(after_events=12)))
        local.model_says("broken", Turn(says=answer, fault=Status(status=400)))
        documented = {
            "TOKENBUS_TEST_PUBLISHER": as_user(local.url, "tokenbus-publisher"),
            "TOKENBUS_TEST_SUBSCRIBER": as_user(local.url, "tokenbus-subscriber"),
            "TOKENBUS_TEST_PARTITIONS": json.dumps({run: Keys().partition_of(run) for run in RUNS}),
            "TOKENBUS_TEST_TEXT": TEXT,
            "TOKENBUS_TEST_REPARTITION": json.dumps([sys.executable, "-m", "tokenbus_services.cli", "repartition"]),
        }
        done = node.run("--test", "dist/test/client.test.js", cwd=project, env=local.environment | documented)
    assert done.returncode == 0, done.stdout + done.stderr
