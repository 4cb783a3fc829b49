"""Every code block of the README and the pages does what it shows: it runs, loads, decodes, or names what exists.

A comment right before a block changes that: ``<!-- runs until stopped -->`` for one that listens forever, and
``<!-- not run: WHY -->`` for one that cannot run at all. The latter are counted here.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import yaml

from tests.services.cli.process import environment, running
from tests.unit.docs.command_lines import check_line
from tests.waiting import eventually
from tokenbus import Client, Generate, UnknownEvent
from tokenbus_services.process.embedded_server import free_port
from tokenbus_services.settings import Settings, load

ROOT = Path(__file__).parents[2]
RUN_BY_OTHERS = {
    ("README.md", "redis"): (1, "test_any_language::test_the_line_of_the_readme_reads_every_partition"),
    ("clients/typescript/README.md", "ts"): (
        1,
        "test_typescript::test_the_client_and_its_readme_compile_and_it_works_on_the_running_bus",
    ),
    ("docs/guides/ag-ui.md", "js"): (
        3,
        "test_gateway::test_the_agent_of_the_page_prints_the_text",
        "test_gateway::test_the_function_of_the_page_approves",
        "test_gateway::test_an_agent_joins_a_run_that_it_had_left",
    ),
    ("docs/guides/any-language.md", "redis"): (
        13,
        "test_any_language::test_every_command_of_the_page_is_in_a_section_that_is_tried_here",
    ),
    ("docs/guides/durable-streams.md", "js"): (
        2,
        "test_gateway::test_the_page_of_durable_streams_prints_the_text",
        "test_gateway::test_the_page_of_durable_streams_writes_into_a_session_once",
    ),
    ("docs/guides/use-chat.md", "js"): (
        3,
        "test_gateway::test_a_page_allows_a_call_and_the_answer_goes_on_in_the_same_message",
        "test_gateway::test_use_chat_of_the_page_resumes_in_a_browsers_document",
        "test_gateway::test_a_chat_over_the_web_socket_transport_of_the_page_has_its_text",
    ),
    ("docs/reference/requests.md", "js"): (1, "test_requests_page::test_the_code_for_node_publishes_a_request"),
    ("docs/reference/requests.md", "redis"): (
        1,
        "test_any_language::test_the_line_of_the_page_on_requests_is_one_of_these",
    ),
}
"""How many blocks of a page and a language tests/clients runs, and the tests that do it."""
UNRUNNABLE = {
    "docs/guides/livekit.md": (2, "test_livekit.py"),
    "docs/guides/pipecat.md": (2, "test_pipecat.py"),
    "docs/guides/temporal.md": (1, "test_workflows.py"),
    "docs/guides/langgraph.md": (1, "test_workflows.py"),
    "docs/guides/kafka.md": (1, "test_workflows.py"),
}
"""Blocks that cannot run here, by page, and the file of tests/integrations that runs them."""
UNTIL_STOPPED = "runs until stopped"
_FENCE = re.compile(
    r"^(?:<!-- (?P<note>[^\n]*?) -->\n)?^```(?P<language>[a-z]*)[^\n]*\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
_ELLIPSIS = re.compile(r'(?<!")…')
_BLOB_ID = "sha256:" + "0" * 64


class CodeBlock(NamedTuple):
    page: str
    line: int
    language: str
    code: str
    note: str

    @property
    def id(self) -> str:
        return f"{self.page}:{self.line}"


def blocks() -> list[CodeBlock]:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    pages += [*sorted((ROOT / "deploy").rglob("*.md")), *sorted((ROOT / "clients").glob("*/README.md"))]
    found: list[CodeBlock] = []
    for path in pages:
        text = path.read_text()
        for match in _FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            page = path.relative_to(ROOT).as_posix()
            found.append(CodeBlock(page, line, match["language"], match["code"], match["note"] or ""))
    return found


def of(*languages: str, where: Callable[[CodeBlock], bool] = lambda block: True) -> pytest.MarkDecorator:
    chosen = [b for b in blocks() if b.language in languages and not b.note.startswith("not run") and where(b)]
    return pytest.mark.parametrize("block", chosen, ids=lambda block: block.id)


def is_file_of_a_test(block: CodeBlock) -> bool:
    """One of docs/guides/testing.md or docs/start/index.md, which are run together by tests of these pages."""
    return bool(re.match(r"# \w+\.py\n", block.code))


def test_only_blocks_with_a_reason_are_not_run() -> None:
    skipped = [block for block in blocks() if block.note.startswith("not run")]
    assert all(block.note.startswith("not run: ") for block in skipped)
    assert Counter(block.page for block in skipped) == {page: count for page, (count, _) in UNRUNNABLE.items()}
    for page, (_, file) in UNRUNNABLE.items():
        assert f'python_of("{Path(page).stem}")' in (ROOT / "tests" / "integrations" / file).read_text()


def test_each_block_that_is_not_run_here_is_run_by_a_named_test() -> None:
    here = {"", "python", "toml", "json", "yaml", "sh", "bash", "console"}
    others = Counter((block.page, block.language) for block in blocks() if block.language not in here)
    assert others == {block: count for block, (count, *_) in RUN_BY_OTHERS.items()}
    for _, *tests in RUN_BY_OTHERS.values():
        for file, _, name in (test.partition("::") for test in tests):
            assert f"def {name}(" in (ROOT / "tests" / "clients" / f"{file}.py").read_text()


# --- Python ---------------------------------------------------------------------------------------------------------


@pytest.fixture
async def bus_environment(tmp_path: Path) -> AsyncGenerator[Mapping[str, str]]:
    """A `tokenbus up --mock` in the block's directory, in which the real providers' names are the mock's too."""
    mock, blobs = free_port(), free_port()
    paths = {"anthropic": "", "openai-chat": "/v1", "openai-responses": "/v1", "gemini": "/v1beta"}
    providers = "".join(
        f'[providers.{api}]\napi = "{api}"\nbase_url = "http://127.0.0.1:{mock}{path}"\napi_key_env = ""\n'
        for api, path in paths.items()
    )
    ports = f"[http]\nfetcher = 0\nnormalizer = 0\nparser = 0\ntools = 0\nblobs = {blobs}\ngateway = 0\n"
    service = f'[blobs]\nservice_url = "http://127.0.0.1:{blobs}"\n'
    (tmp_path / "settings.toml").write_text(f"{providers}{ports}{service}")
    env = {
        "TOKENBUS_CONFIG": str(tmp_path / "settings.toml"),
        "TOKENBUS_DATA": str(tmp_path / ".tokenbus"),
        "TOKENBUS_BLOBS_URL": f"http://127.0.0.1:{blobs}",
    }
    command = (sys.executable, "-m", "tokenbus_services.mock_provider", "--any-model", "--port", str(mock))
    provider = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
    try:
        async with running(tmp_path / "up.log", "up", "--mock", **env) as up:
            while up.seen[-1:] != ["ready"]:
                await up.says("ready")
            yield environment(**{name: value for name, value in env.items() if name != "TOKENBUS_CONFIG"})
            await up.stop()
    finally:
        provider.kill()
        await provider.wait()


async def _run(block: CodeBlock, directory: Path, env: Mapping[str, str]) -> None:
    script = directory / "block.py"
    script.write_text(block.code)
    for image in ("photo.png", "cat.png"):
        (directory / image).write_bytes(_PNG)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "error", str(script)),
        cwd=directory,
        env={**env, "PYTHONUNBUFFERED": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    if block.note == UNTIL_STOPPED:
        await _listens(process, env)
        return
    async with asyncio.timeout(60):
        output, _ = await process.communicate()
    assert process.returncode == 0, f"{block.id}\n{output.decode()}"


async def _listens(process: asyncio.subprocess.Process, env: Mapping[str, str]) -> None:
    """It prints something of the runs that are published, and of the session that is made, while it listens."""
    assert process.stdout
    printed = asyncio.create_task(process.stdout.read(4_096))
    request = {"provider": "mock-anthropic", "model": "any", "messages": [{"role": "user", "content": "Hello!"}]}
    url = json.loads((Path(env["TOKENBUS_DATA"]) / "up.json").read_text())["redis_url"]
    try:
        async with Client(url) as bus:

            async def received() -> bool:
                await (await bus.publish(request)).result()
                await bus.session("brief").configure({"provider": "mock-anthropic", "model": "any"})
                await bus.session("brief").delete()
                return printed.done()

            await eventually(received, timeout=60)
        output = printed.result().decode()
        assert output, "it ended"
        assert "Traceback" not in output, output
    finally:
        printed.cancel()
        if process.returncode is None:
            process.kill()
        await process.wait()


_PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
    "1f15c4890000000d49444154789c6360000002000001e221bc330000000049454e44ae426082"
)


async def test_the_python_of_every_page_runs_unchanged(tmp_path: Path, bus_environment: Mapping[str, str]) -> None:
    python = [b for b in blocks() if b.language == "python" and not b.note.startswith("not run")]
    assert {"README.md", "docs/guides/sessions.md", "docs/guides/subscribing.md"} <= {block.page for block in python}
    for block in python:
        if not is_file_of_a_test(block):
            await _run(block, tmp_path, bus_environment)
    wrong = CodeBlock("no page", 1, "python", "import asyncio\nawait asyncio.sleep(0)\n", "")
    with pytest.raises(AssertionError, match="SyntaxError"):
        await _run(wrong, tmp_path, bus_environment)


# --- shell ----------------------------------------------------------------------------------------------------------

STARTED_BY_OTHERS = {
    "make": "tests/e2e/operating/test_demo.py",
    "tokenbus up": "this file's fixture, and tests/services/cli/up",
    "tokenbus worker": "tests/services/cli/worker",
    "pip": "the light client of .ci/run",
    "python": "tests/examples/test_start_page.py",
    "curl": "asks a default port: tests/e2e/operating/test_metrics.py, tests/e2e/gateway/test_native.py",
}
"""What a block must not start here, and what else runs it."""


async def test_the_shell_of_every_page_runs_unchanged(tmp_path: Path, bus_environment: Mapping[str, str]) -> None:
    shell = [b for b in blocks() if b.language == "sh"]
    here = [b for b in shell if not any(re.search(rf"^.*\b{word}\b", b.code, re.M) for word in STARTED_BY_OTHERS)]
    assert {"docs/operate/runs.md", "docs/operate/upgrade.md", "docs/start/index.md"} <= {block.page for block in here}
    (tmp_path / "tokenbus.log").write_text("")
    env = {**bus_environment, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for block in here:
        process = await asyncio.create_subprocess_exec(
            *("bash", "-c", block.code),
            cwd=tmp_path,
            env=env,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        async with asyncio.timeout(120):
            output, _ = await process.communicate()
        text = f"{block.id}\n{output.decode()}"
        right = {0, 1} if "tokenbus doctor" in block.code else {0}  # 1: it found something, a missing key say
        assert process.returncode in right, text
        assert "Traceback" not in text


# --- settings, requests and events ----------------------------------------------------------------------------------


@of("toml")
def test_settings_of_a_page_load_unchanged(block: CodeBlock, tmp_path: Path) -> None:
    path = tmp_path / "tokenbus.toml"
    path.write_text(block.code)
    assert isinstance(load({"TOKENBUS_CONFIG": str(path)}), Settings)


@of("json")
def test_json_of_a_page_is_json_and_decodes_if_it_is_a_request_or_an_event(block: CodeBlock) -> None:
    from tokenbus.events import decisions, public

    value = json.loads(block.code.replace("sha256:…", _BLOB_ID))
    kind = value.get("type") if isinstance(value, dict) else None
    data = json.dumps(value).encode()
    if kind == "generate":
        msgspec.json.decode(data, type=Generate)
    elif kind == "decision":
        decisions.decoder.decode(data)
    elif isinstance(value, dict) and "seq" in value:
        assert not isinstance(public.decode(data), UnknownEvent)


@of("yaml")
def test_yaml_of_a_page_names_services_of_the_compose_file(block: CodeBlock) -> None:
    value = yaml.safe_load(block.code)
    scraped = value.get("scrape_configs", [])
    named = {*value.get("services", ()), *(n for job in scraped for dns in job["dns_sd_configs"] for n in dns["names"])}
    assert named
    assert named <= {*yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]}


# --- commands -------------------------------------------------------------------------------------------------------


@of("", "sh", "bash", "console")
def test_commands_of_a_page_can_be_typed(block: CodeBlock) -> None:
    """The command, its options, values and arguments are accepted. tests/unit/docs plants lines that are not."""
    for line in block.code.replace("\\\n", " ").splitlines():
        if re.match(r"(\$ )?([A-Z_]+=\S+ )*(make|tokenbus|docker|kubectl|pip|python|\.venv/bin/\w+) ", line):
            check_line(line)
