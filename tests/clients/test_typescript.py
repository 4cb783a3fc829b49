"""clients/typescript: its types are those of the events, it type-checks strictly, and works on the running bus."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import shutil
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from tests.clients import node
from tests.security.tls import Certificates
from tests.servers import sentinel_group
from tokenbus.bus.dead_letters import newest_dead_letters
from tokenbus.bus.keys import Keys
from tokenbus.client.rerun import request_again
from tokenbus.errors import TokenbusError
from tokenbus.events.requests import Generate
from tokenbus.shaping.json_elements import JsonElements
from tokenbus.shaping.sentences import SentenceRules, Sentences
from tokenbus.testing import CutOff, Delivery, LocalBus, ModelRequest, Reply, Stall, Status, ToolCall, Turn
from tokenbus.tools import ToolContext

USERS = Path(__file__).parents[2] / "deploy" / "acl" / "users.conf"
TEXT = "Yes, take it along. It should be dry from six in the evening on. 🌤️ Then you may go without."
SETTINGS = """
[tools.weather]
kind = "python"
call = "tests.clients.test_typescript:weather"
[tools.research]
kind = "run"
provider = "anthropic"
model = "greeter"
[tools.book]
kind = "python"
call = "tests.clients.test_typescript:book"
parameters = { type = "object" }
[tools.pay]
kind = "python"
call = "tests.clients.test_typescript:pay"
parameters = { type = "object", properties = { amount = { type = "integer" } } }
approval = "always"
[providers.anthropic]
quirks = { models_continuing = ["stalled", "cut-later", "broken"] }
"""
RUNS = [f"run-{n}" for n in range(12)] + ["Zürich".encode().hex(), "a:b@c~d+e=f"]


def weather(city: str) -> str:
    return f"rain in {city}"


async def book(context: ToolContext) -> str:
    answer = await context.ask(SEAT, "Which seat?")
    return f"{answer.decision} {answer.content} by {answer.by}"


def pay(amount: int) -> str:
    return f"paid {amount}"


SEAT = {"type": "object", "properties": {"seat": {"type": "string"}}, "required": ["seat"]}

WORDS = [
    *("Hello", "the", "e.g.", "Dr.", "bzw.", "no.", "3", "5.", "I.", "Z.", "so", "Étienne", "„Wirklich?“", '"Really?"'),
    *(
        "she",
        "and",
        "ok!",
        "what?!",
        "…",
        "🌤️",
        "end.",
        "end.)",
        "a,",
        "b;",
        "—",
        "今日は晴れ。",
        "「はい。」と",
        "\n",
        "\n\n",
    ),
    *(
        "1.",
        "a.",
        "- x.",
        "München.",
        "12.",
        "Mai",
        "www.x.org",
        "3.14",
        "   ",
        "supercalifragilistic" * 2,
        "г.",  # noqa: RUF001
        "Мир.",
    ),
]
PARTS = [
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    '"a"',
    '"b"',
    '"\\u00e9\\n"',
    "1",
    "-2.5e3",
    "true",
    "null",
    " ",
    "0",
    '"',
    "\\",
    "01",
    "tru",
]
PATHS = ["*", "", "a", "a.*", "*.0", "a.b", "*.*"]


def pieces_of(text: str, chance: random.Random) -> list[str]:
    """The text in pieces."""
    cuts = sorted({0, len(text), *(chance.randint(0, len(text)) for _ in range(len(text) // 5))})
    return [text[first:last] for first, last in itertools.pairwise(cuts)]


def some_texts() -> list[tuple[list[str], dict[str, Any]]]:
    """Texts in pieces, and the rules by which each is cut."""
    chance = random.Random(35)
    made: list[tuple[list[str], dict[str, Any]]] = []
    for _ in range(600):
        text = " ".join(chance.choice(WORDS) for _ in range(chance.randint(1, 40)))
        rules = {"least": chance.choice([0, 4, 8]), "most": chance.choice([8, 20, 300])}
        language = chance.choice([None, "de", "en-GB", "xx"])
        made.append((pieces_of(text, chance), {**rules, **({"language": language} if language else {})}))
    return made


def some_jsons() -> list[tuple[list[str], str]]:
    """JSON texts in pieces, of which some are not valid, and a path in each."""
    chance = random.Random(35)

    def value(depth: int) -> Any:
        kind = chance.choice(["list", "object", "text", "number", "word"] if depth else ["text", "number"])
        if kind == "list":
            return [value(depth - 1) for _ in range(chance.randint(0, 3))]
        if kind == "object":
            return {name: value(depth - 1) for name in chance.sample(["a", "b", "ü"], chance.randint(0, 3))}
        return {"text": chance.choice(["", "x]", 'q"', "é\n", "y" * 30]), "number": chance.choice([0, -1.5, 2e9])}.get(
            kind
        )

    texts = [json.dumps(value(6), ensure_ascii=chance.random() < 0.5) for _ in range(300)]
    texts += ["".join(chance.choice(PARTS) for _ in range(chance.randint(0, 9))) for _ in range(300)]
    texts += [text[: chance.randint(0, len(text))] for text in texts[:100]]
    return [(pieces_of(text, chance), chance.choice(PATHS)) for text in texts]


def python_elements(pieces: list[str], path: str) -> list[object]:
    """What Python's reader gives: paths and values, and the code of an error."""
    reader, given = JsonElements(path, most_characters=40, most_depth=5), list[object]()
    try:
        for piece in pieces:
            given += [[list(one.path), one.value] for one in reader.feed(piece)]
        given += [[list(one.path), one.value] for one in reader.end()]
    except TokenbusError as e:
        given.append(e.code)
    return given


def as_user(url: str, name: str) -> str:
    """The url under which a user of deploy/acl, made here, logs in."""
    (rules,) = re.findall(rf"^user {name} (.+)$", USERS.read_text(), re.MULTILINE)
    with closing(redis.Redis.from_url(url)) as server:
        # Redis 7.0 does not know that one, and a client bears its refusal.
        known = [rule for rule in rules.split() if rule != "+client|setinfo"]
        server.execute_command("ACL", "SETUSER", name, ">secret", *known)
    return url.replace("//", f"//{name}:secret@")


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


@pytest.mark.timeout(900)  # a compiler that needs 10 s of a processor has a tenth of one beside other tests
def test_the_client_and_its_readme_compile_and_it_works_on_the_running_bus(tmp_path: Path) -> None:
    project = node.project(tmp_path)
    (readme,) = re.findall(r"```ts\n(.*?)```", (node.PACKAGE / "README.md").read_text(), re.DOTALL)
    (project / "test" / "readme.ts").write_text(readme.replace("@tokenbus/client", "../src/index.js"))
    compiled = node.run("node_modules/typescript/bin/tsc", cwd=project)
    assert compiled.returncode == 0, compiled.stdout
    texts, jsons = some_texts(), some_jsons()
    corpus = tmp_path / "corpus.json"
    corpus.write_text(json.dumps({"texts": texts, "jsons": jsons}))
    answer = Reply(thinking="Hm.", text=TEXT, chunk_size=7)
    certificates, found = Certificates(tmp_path), tmp_path / "found.json"
    with (
        LocalBus(SETTINGS) as local,
        sentinel_group(tmp_path) as sentinel,
    ):
        call = ToolCall(name="weather", arguments={"city": "Oslo"})
        local.model_says("calls", Reply(thinking="Let me see.", text="I'll ask.", tool_calls=(call,)))
        local.model_says("greeter", answer)
        ask = ToolCall(name="research", arguments={"task": "Go on."})
        local.model_says("delegates", Reply(tool_calls=(ask, ask)), "Done.")
        asks = (ToolCall(name="book", arguments={}), ToolCall(name="pay", arguments={"amount": 500}))
        local.model_says("asks", Reply(tool_calls=(*asks, ToolCall(name="where", arguments={}))), "Done.")
        cut = Turn(says=Reply(text="It is dry  \n", chunk_size=3), fault=CutOff(after_text="dry"))
        items = Reply(text='{"n": [0], "items": [{"a": 1}, "b]", 2.5]}', chunk_size=5)
        local.model_says("lists", items)
        local.model_says("stalled-list", Turn(says=items, fault=Stall(after_text=": 1},")))

        def cut_later(request: ModelRequest) -> Reply | Turn:
            if not request.tool_results:
                return Reply(text="I'll ask.", tool_calls=(call,))
            return Reply(text="Bye.") if "dry" in str(request.body) else cut

        local.model_says("cut-later", cut_later)
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
            "TOKENBUS_TEST_CORPUS": str(corpus),
            "TOKENBUS_TEST_BLOBS": local.blobs,
            "TOKENBUS_TEST_SERVER_TLS": json.dumps(
                [certificates.server_cert, certificates.server_key, certificates.ca]
            ),
            "TOKENBUS_TEST_TLS": certificates.query(),
            "TOKENBUS_TEST_STRANGE_TLS": certificates.query(ssl_ca_certs=certificates.other_ca),
            "TOKENBUS_TEST_SENTINEL": sentinel.url,
        }
        features = ("--test", "dist/test/features.test.js")
        done = node.run(*features, cwd=project, env=local.environment | others, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        assert requested(redis.Redis(port=sentinel.replica.port)) >= {"before", "after"}
        compare(local, json.loads(found.read_text()))
        gave = json.loads(found.read_text())
        asyncio.run(compare_more(local, gave))
        for (pieces, rules), cut in zip(texts, gave["cut"], strict=True):
            cutter = Sentences(SentenceRules(**rules))
            assert cut == [sentence for piece in pieces for sentence in cutter.feed(piece)] + cutter.end(), rules
        for (pieces, path), elements in zip(jsons, gave["elements"], strict=True):
            assert elements == python_elements(pieces, path), (pieces, path)
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


async def compare_more(local: LocalBus, found: dict[str, Any]) -> None:
    """The same for what Python's asynchronous client alone gives, and for what it keeps to itself."""
    async with local.client() as bus:
        keys = Keys()
        for run, resumed in found["resumed"].items():
            deployment = bus._deployment  # pyright: ignore[reportPrivateUsage]
            mine = await request_again(deployment, run, "resume", again=1, events=bus.follow(run))
            stored = await deployment.server.client.hget(keys.run(resumed), "request")
            theirs = msgspec.json.decode(stored, type=Generate)
            assert (theirs.id, theirs.messages, theirs.metadata) == (mine.id, mine.messages, mine.metadata)
            assert (theirs.provider, theirs.model, theirs.tools) == (mine.provider, mine.model, mine.tools)
        server = bus._deployment.server  # pyright: ignore[reportPrivateUsage]
        dead = [letter.entry async for letter in newest_dead_letters(server, keys, most=9)]
        assert [(letter.run, letter.seq) for letter in dead if letter.group == "runs:poison"] == [("poisoned", 0)]
        top, shown = found["tree"]
        tree = [step async for step in bus.follow_tree(top)]
        assert {step.event.run for step in tree} == {top, f"{top}~0", f"{top}~1"}
        assert shown == [[step.event.run, step.event.seq, [*step.path], str(step.cursor)] for step in tree]
        session, told = bus.session("talk", tenant="ada"), found["session"]
        steps = [step async for step in session.follow(live=False)]
        tags = [str(step.event.__struct_config__.tag) for step in steps]
        assert told["steps"] == [[tag, str(step.cursor)] for tag, step in zip(tags, steps, strict=True)]
        assert told["messages"] == msgspec.to_builtins(await session.messages())
        assert any(message["content"] == "Faster." for message in told["messages"])
        assert told["fork"] == msgspec.to_builtins(await bus.session("branch", tenant="ada").messages())
        listed = [info async for info in bus.sessions(tenant="ada")]
        names = {info.session: [info.begun_ms, info.model, info.runs, info.begins, info.metadata] for info in listed}
        assert [one["session"] for one in told["sessions"]] == [info.session for info in listed]
        assert names == {
            one["session"]: [one["begunMs"], one["model"], one["runs"], one["begins"], one["metadata"]]
            for one in told["sessions"]
        }
