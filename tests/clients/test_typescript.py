"""clients/typescript: its types are those of the events, it type-checks strictly, and works on the running bus."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import redis

from tests.clients import node
from tests.security.tls import Certificates
from tests.servers import sentinel_group
from tokenbus.bus.keys import Keys
from tokenbus.testing import Delivery, LocalBus, Reply, Stall, Status, ToolCall, Turn

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


def test_the_package_has_its_license_and_nothing_of_the_tests(tmp_path: Path) -> None:
    project = node.project(tmp_path)
    for name in ("README.md", "package-lock.json"):
        shutil.copy(node.PACKAGE / name, project)
    package = json.loads((project / "package.json").read_text())
    package["scripts"]["prepack"] = package["scripts"]["prepack"].replace("../..", str(node.PACKAGE.parents[1]))
    (project / "package.json").write_text(json.dumps(package))
    packed = node.run(node.NPM, "pack", "--json", cwd=project)
    assert packed.returncode == 0, packed.stderr
    files = {file["path"] for file in json.loads(packed.stdout[packed.stdout.index("[") :])[0]["files"]}
    assert {"LICENSE", "README.md", "package.json", "dist/src/index.js", "dist/src/index.d.ts"} <= files
    assert not [file for file in files if "test" in file]


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
    certificates, found = Certificates(tmp_path), tmp_path / "found.json"
    with (
        LocalBus() as local,
        sentinel_group(tmp_path) as sentinel,
    ):
        call = ToolCall(name="weather", arguments={"city": "Oslo"})
        local.model_says("calls", Reply(thinking="Let me see.", text="I'll ask.", tool_calls=(call,)))
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
        others = {
            "TOKENBUS_TEST_FOUND": str(found),
            "TOKENBUS_TEST_SERVER_TLS": json.dumps(
                [certificates.server_cert, certificates.server_key, certificates.ca]
            ),
            "TOKENBUS_TEST_TLS": certificates.query(),
            "TOKENBUS_TEST_STRANGE_TLS": certificates.query(ssl_ca_certs=certificates.other_ca),
            "TOKENBUS_TEST_SENTINEL": sentinel.url,
        }
        done = node.run("--test", "dist/test/features.test.js", cwd=project, env=local.environment | others)
        assert done.returncode == 0, done.stdout + done.stderr
        assert requested(redis.Redis(port=sentinel.replica.port)) >= {"before", "after"}
        compare(local, json.loads(found.read_text()))
        done = node.run("--test", "dist/test/client.test.js", cwd=project, env=local.environment | documented)
    assert done.returncode == 0, done.stdout + done.stderr


def requested(server: redis.Redis) -> set[str]:
    with closing(server):
        entries: Any = server.xrange("tokenbus:requests")
    return {json.loads(fields[b"__data__"])["id"] for _, fields in entries}


def compare(local: LocalBus, found: dict[str, Any]) -> None:
    """What the client for Node gave, with what Python's gives."""
    with local.sync_client() as bus:
        for run, messages in found["messages"].items():
            assert messages == msgspec.to_builtins(bus.messages(run)), run
        run, messages = found["heard"]
        assert messages == msgspec.to_builtins(bus.messages(run, heard_through=5, heard_characters=2))
        run, again = found["retried"]
        assert bus.retry(run).id == again
        runs = {info.run: [info.run, info.state, info.accepted_ms] for info in bus.runs(limit=1000)}
        listed = [run for run, _, _ in found["runs"]]
        assert found["runs"] == [runs[run] for run in listed]
        assert listed == [run for run in runs if run in set(listed)], "in the same order"
        # The group goes on where the workers of Node stopped.
        with bus.subscribe("visible", group="shared", from_="start") as chunks:
            bus.publish({**local.request("greeter"), "id": "by-python"}).result()
            for chunk in chunks:
                assert not chunk.run.startswith("group-")
                if chunk.run == "by-python":
                    break
