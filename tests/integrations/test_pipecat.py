"""The plug-in for Pipecat, and Pipecat's OpenAI service at the gateway, in its own pipelines without a transport."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

pytest.importorskip("pipecat", reason="pipecat-ai is not installed: make test-integrations")

from pipecat.frames.frames import (
    BotStartedSpeakingFrame,
    CancelFrame,
    EndFrame,
    ErrorFrame,
    LLMContextFrame,
    LLMFullResponseEndFrame,
    LLMTextFrame,
    TTSTextFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.llm_service import FunctionCallParams
from pipecat.utils.text.base_text_aggregator import TextType
from pipecat.workers.runner import WorkerRunner

from tests.integrations.voice import HEARD, SENTENCES, gone, history_of, how_it_was_left, python_of, running_bus
from tests.waiting import eventually
from tokenbus import Cancelled, Client, Started
from tokenbus.integrations.pipecat import TokenbusLLMService
from tokenbus.testing import LocalBus


@pytest.fixture(scope="module")
def local() -> Iterator[LocalBus]:
    with running_bus() as bus:
        yield bus


@pytest.fixture
async def bus(local: LocalBus) -> AsyncGenerator[Client]:
    async with local.client() as client:
        yield client


class Speaker(FrameProcessor):
    """Speaks the first words of each answer and is silent then; keeps what the model wrote, and its errors."""

    def __init__(self, *, buffers: bool = False, lasts: bool = False) -> None:
        """``buffers``: it has not begun to speak when it is interrupted. ``lasts``: it speaks the first answer until
        then, so the end of that stays in its queue.
        """
        super().__init__()
        self._buffers = buffers
        self._lasts = lasts
        self.written = ""
        self.answers = 0
        self.spoken = False

    async def process_frame(self, frame: Any, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, LLMTextFrame):
            self.written += frame.text
            if len(self.written) > len(HEARD) and not self.spoken:
                self.spoken = True
                if self._buffers:
                    return
                await self.push_frame(BotStartedSpeakingFrame(), FrameDirection.UPSTREAM)
                await self.push_frame(TTSTextFrame(HEARD, TextType.SENTENCE))
            return
        if isinstance(frame, LLMFullResponseEndFrame):
            self.answers += 1
            if self._lasts and self.answers == 1:
                return
        await self.push_frame(frame, direction)

    async def interrupt(self) -> None:
        """As a listener does who speaks."""
        await self.broadcast_interruption()


class Talk:
    """A pipeline that runs: ask with `ask`."""

    def __init__(self, model: Any, *tools: Any, speaker: Speaker | None = None) -> None:
        given: dict[str, Any] = {"tools": list(tools)} if tools else {}
        self.context = LLMContext([{"role": "system", "content": "Be brief."}], **given)
        self.speaker = speaker or Speaker()
        self.errors: list[str] = []
        pair = LLMContextAggregatorPair(self.context)
        self.worker = PipelineWorker(
            Pipeline([pair.user(), model, self.speaker, pair.assistant()]),
            cancel_on_idle_timeout=False,
            enable_rtvi=False,
        )
        self.worker.set_reached_upstream_filter((ErrorFrame,))

        @self.worker.event_handler("on_frame_reached_upstream")
        async def failed(worker: Any, frame: Any) -> None:
            self.errors.append(frame.error)

    async def ask(self, text: str = "What about the weather?") -> None:
        self.context.add_message({"role": "user", "content": text})
        await self.worker.queue_frame(LLMContextFrame(self.context))


@asynccontextmanager
async def talking(model: Any, *tools: Any, speaker: Speaker | None = None) -> AsyncGenerator[Talk]:
    talk = Talk(model, *tools, speaker=speaker)
    async with running(talk.worker):
        yield talk


@asynccontextmanager
async def running(worker: PipelineWorker) -> AsyncGenerator[None]:
    runner, started = WorkerRunner(handle_sigint=False), asyncio.Event()

    @worker.event_handler("on_pipeline_started")
    async def begun(worker: Any, frame: Any) -> None:
        started.set()

    await runner.add_workers(worker)
    task = asyncio.create_task(runner.run())
    await started.wait()
    try:
        yield
    finally:
        await worker.queue_frame(EndFrame())
        await task


def model_of(bus: Client, name: str, heard_wait_s: float = 30, **fields: Any) -> TokenbusLLMService:
    return TokenbusLLMService(bus, provider="anthropic", model=name, heard_wait_s=heard_wait_s, **fields)


async def test_an_answer_passes_through_the_pipeline(local: LocalBus, bus: Client) -> None:
    async with talking(model_of(bus, "text", temperature=0.5)) as talk:
        await talk.ask()
        await eventually(lambda: talk.speaker.answers)
        assert talk.speaker.written == SENTENCES
    assert local.requests[-1]["temperature"] == 0.5


async def test_an_interrupted_turn_is_cancelled_with_what_was_spoken_of_it(local: LocalBus, bus: Client) -> None:
    model, begun = model_of(bus, "long"), len(local.exchanges)
    async with talking(model) as talk:
        await talk.ask()
        await eventually(lambda: talk.speaker.spoken and local.exchanges[begun].state == "stalled")
        run = model._turns._recent[-1].run
        await talk.speaker.interrupt()
        await gone(local, begun)
        end, received = await how_it_was_left(bus, run)
        assert end.reason == "interrupted"
        assert received
        await eventually(lambda: {"role": "assistant", "content": HEARD} in talk.context.messages)

        # The next turn gets the text that was heard, and its run's metadata name the run.
        await talk.ask("I shall be brief, too.")
        await eventually(lambda: talk.speaker.written.endswith("As you like."))
        started = await anext(aiter(bus.follow(model._turns._recent[-1].run)))
        assert isinstance(started, Started)
        assert (started.metadata or {})["heard"] == {"run": run, "through": end.heard_through}


@pytest.mark.parametrize("ended", [False, True])
async def test_the_history_of_a_session_is_what_was_heard_after_one_interruption(
    local: LocalBus, bus: Client, ended: bool
) -> None:
    history, begun = bus.session(f"pipecat-{ended}"), len(local.exchanges)
    model = model_of(bus, "slow" if ended else "long", session=history)
    async with talking(model, speaker=Speaker(lasts=True)) as talk:
        await talk.ask()
        await eventually(lambda: talk.speaker.spoken)
        await eventually(lambda: model._turns._recent[-1].ended if ended else local.exchanges[begun].state == "stalled")
        await talk.speaker.interrupt()
        await eventually(lambda: model._turns._recent[-1].left and not model._turns._leaving)
        said = await history_of(history)
        assert said[0] == ("user", "What about the weather?")
        assert said[1][1].strip()
        assert HEARD.startswith(said[1][1].strip())

        await eventually(lambda: {"role": "assistant", "content": HEARD} in talk.context.messages)
        await talk.ask("I shall be brief, too.")
        await eventually(lambda: len(local.exchanges) > begun + 1 and model._turns._recent[-1].ended)
        asked = [(one["role"], one["content"][0]["text"]) for one in local.requests[begun + 1]["messages"]]
        assert asked == [*said, ("user", "I shall be brief, too.")]


@pytest.mark.parametrize("hangs_up", [False, True])
@pytest.mark.parametrize("buffers", [False, True])
async def test_who_leaves_closes_the_call_at_once_and_heard_nothing_before_the_first_word(
    local: LocalBus, bus: Client, hangs_up: bool, buffers: bool
) -> None:
    model, begun = model_of(bus, "long", heard_wait_s=600), len(local.exchanges)  # the test would not end
    async with talking(model, speaker=Speaker(buffers=buffers)) as talk:
        await talk.ask()
        await eventually(lambda: talk.speaker.spoken and local.exchanges[begun].state == "stalled")
        run = model._turns._recent[-1].run
        if hangs_up:
            await talk.worker.queue_frame(CancelFrame())
        else:
            await talk.speaker.interrupt()
        await gone(local, begun)
    (end,) = [event async for event in bus.follow(run) if isinstance(event, Cancelled)]
    assert end.heard_through == -1 if buffers else end.heard_through != -1


async def test_a_tool_of_the_pipeline_runs_there_and_its_result_goes_back(local: LocalBus, bus: Client) -> None:
    async def place(params: FunctionCallParams, of: str) -> None:
        """Where somebody is.

        Args:
            of: Who.
        """
        await params.result_callback(f"{of} is here")

    model = model_of(bus, "calls")
    model.register_direct_function(place)
    async with talking(model, place) as talk:
        await talk.ask("Where is Ann?")
        await eventually(lambda: "Ann is here" in talk.speaker.written)


async def test_what_a_policy_replaces_is_never_spoken(local: LocalBus, bus: Client) -> None:
    async with talking(model_of(bus, "text", policies=["quiet"])) as talk:
        await talk.ask()
        await eventually(lambda: talk.speaker.answers)
        assert talk.speaker.written == SENTENCES.replace("umbrella", "coat")


@pytest.mark.parametrize("name", ["failing", "cut"])
async def test_a_failure_is_reported_to_the_pipeline_and_ends_the_turn(local: LocalBus, bus: Client, name: str) -> None:
    async with talking(model_of(bus, name)) as talk:
        await talk.ask()
        await eventually(lambda: talk.speaker.answers and talk.errors)
        assert "run" in talk.errors[0]


async def test_an_answer_outside_the_pipeline_is_not_visible(local: LocalBus, bus: Client) -> None:
    model = model_of(bus, "text")
    assert await model.run_inference(LLMContext([{"role": "user", "content": "Sum it up."}])) == SENTENCES


async def test_the_pipeline_of_the_guide_runs(local: LocalBus, bus: Client) -> None:
    (_, bot), guide, speaker = python_of("pipecat"), dict[str, Any](), Speaker()
    exec(bot.replace("claude-haiku-4-5", "text"), guide)
    context = LLMContext([{"role": "user", "content": "Hello."}])
    worker = PipelineWorker(guide["pipeline"](bus, context, speaker), cancel_on_idle_timeout=False, enable_rtvi=False)
    async with running(worker):
        await worker.queue_frame(LLMContextFrame(context))
        await eventually(lambda: speaker.answers)
    assert speaker.written == SENTENCES


# --- Pipecat's own service for OpenAI, at the gateway -----------------------------------------------------------------


@asynccontextmanager
async def plain(local: LocalBus, name: str) -> AsyncGenerator[Any]:
    pytest.importorskip("pipecat.services.openai.llm", reason="pipecat-ai[openai] is not installed")
    (endpoint, _), guide = python_of("pipecat"), dict[str, Any]()
    exec(endpoint.replace("http://127.0.0.1:8088", local.gateway).replace("claude-haiku-4-5", name), guide)
    yield guide["model"]
    await guide["model"]._client.close()


async def test_pipecats_own_openai_service_reads_the_gateway(local: LocalBus) -> None:
    async with plain(local, "text") as model, talking(model) as talk:
        await talk.ask()
        await eventually(lambda: talk.speaker.answers)
        assert talk.speaker.written == SENTENCES


async def test_an_interruption_of_pipecats_own_service_closes_the_call_of_the_provider(local: LocalBus) -> None:
    begun = len(local.exchanges)
    async with plain(local, "long") as model, talking(model) as talk:
        await talk.ask()
        await eventually(lambda: talk.speaker.spoken and local.exchanges[begun].state == "stalled")
        await talk.speaker.interrupt()
        await gone(local, begun)
