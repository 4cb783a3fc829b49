"""The plug-in for LiveKit, and LiveKit's OpenAI plug-in at the gateway, with its own session but no room."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest

pytest.importorskip("livekit.agents", reason="livekit-agents is not installed: make test-integrations")

from livekit.agents import Agent, AgentSession, APIConnectOptions, APIStatusError, function_tool, llm, tts
from livekit.agents.types import NOT_GIVEN
from livekit.agents.voice import io

from tests.integrations.voice import HEARD, SENTENCES, gone, history_of, how_it_was_left, python_of, running_bus
from tests.waiting import eventually
from tokenbus import Cancelled, Client, Started
from tokenbus.errors import ServerUnavailable
from tokenbus.integrations import livekit
from tokenbus.testing import LocalBus

AT_ONCE = APIConnectOptions(max_retry=2, retry_interval=0.0, timeout=60)
RATE = 24_000


@pytest.fixture(scope="module")
def local() -> Iterator[LocalBus]:
    with running_bus() as bus:
        yield bus


@pytest.fixture
async def bus(local: LocalBus) -> AsyncGenerator[Client]:
    async with local.client() as client:
        yield client


class Voice(tts.TTS):
    """Says everything as silence."""

    def __init__(self) -> None:
        super().__init__(capabilities=tts.TTSCapabilities(streaming=False), sample_rate=RATE, num_channels=1)

    def synthesize(self, text: str, *, conn_options: APIConnectOptions = AT_ONCE) -> tts.ChunkedStream:
        return SilentAudio(tts=self, input_text=text, conn_options=conn_options)


class SilentAudio(tts.ChunkedStream):
    async def _run(self, output_emitter: tts.AudioEmitter) -> None:
        output_emitter.initialize(request_id="voice", sample_rate=RATE, num_channels=1, mime_type="audio/pcm")
        output_emitter.push(bytes(2 * RATE))
        output_emitter.flush()


class Speaker(io.AudioOutput):
    """An audio output that never finishes, and reports the spoken words when it is interrupted."""

    def __init__(self, *, buffers: bool = False) -> None:
        """``buffers``: it has not begun to play when it is interrupted."""
        super().__init__(label="test", capabilities=io.AudioOutputCapabilities(pause=False), sample_rate=RATE)
        self.playing = False
        self._buffers = buffers

    async def capture_frame(self, frame: Any) -> None:
        await super().capture_frame(frame)
        if not self.playing and not self._buffers:
            self.playing = True
            self.on_playback_started(created_at=0.0)

    def flush(self) -> None:
        super().flush()

    def clear_buffer(self) -> None:
        if self._pending_playback_count:
            position, heard = (0.0, "") if self._buffers else (0.5, HEARD)
            self.on_playback_finished(playback_position=position, interrupted=True, synchronized_transcript=heard)


class Texts(io.TextOutput):
    def __init__(self) -> None:
        super().__init__(label="test", next_in_chain=None)
        self.text = ""

    async def capture_text(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


async def session_with(model: llm.LLM, *tools: Any, speaker: Speaker | None = None) -> AgentSession[None]:
    session = AgentSession[None](llm=model, tts=Voice() if speaker else NOT_GIVEN)
    await session.start(Agent(instructions="Be brief.", tools=list(tools)))
    session.output.audio = speaker
    return session


def chat_context(text: str = "Hello.") -> llm.ChatContext:
    context = llm.ChatContext.empty()
    context.add_message(role="user", content=text)
    return context


async def test_an_answer_has_its_text_its_usage_and_the_id_of_its_run(local: LocalBus, bus: Client) -> None:
    stream = livekit.LLM(bus, provider="anthropic", model="text").chat(chat_ctx=chat_context())
    answer = await stream.collect()
    assert answer.text == SENTENCES
    assert answer.usage
    assert answer.usage.completion_tokens > 0
    assert (await bus.result(stream.run)).text == SENTENCES


async def test_an_interrupted_turn_is_cancelled_with_what_was_spoken_of_it(local: LocalBus, bus: Client) -> None:
    model, speaker = livekit.LLM(bus, provider="anthropic", model="long", heard_wait_s=30), Speaker()
    session = await session_with(model, speaker=speaker)
    model.listen(session)
    spoken: list[Any] = []
    session.on("conversation_item_added", lambda event: spoken.append(event.item))
    begun = len(local.exchanges)
    speech = session.generate_reply(user_input="What about the weather?")
    await eventually(lambda: speaker.playing and local.exchanges[begun].state == "stalled")
    await speech.interrupt()
    await gone(local, begun)
    run = model._turns._recent[-1].run
    end, received = await how_it_was_left(bus, run)
    assert end.reason == "interrupted"
    assert received
    assert [item.text_content for item in spoken if item.role == "assistant" and item.interrupted] == [HEARD]

    # The next turn gets the text that was heard, and its run's metadata name the run.
    speaker.playing = False
    reply = session.generate_reply(user_input="I shall be brief, too.")
    await eventually(lambda: len(local.exchanges) > begun + 1 and model._turns._recent[-1].ended)
    requests = local.requests[begun + 1]["messages"]
    assert [part["text"] for message in requests if message["role"] == "assistant" for part in message["content"]] == [
        HEARD
    ]
    started = await anext(aiter(bus.follow(model._turns._recent[-1].run)))
    assert isinstance(started, Started)
    assert (started.metadata or {})["heard"] == {"run": run, "through": end.heard_through}
    await eventually(lambda: speaker.playing)
    await reply.interrupt()
    await session.aclose()
    await model.aclose()


@pytest.mark.parametrize("ended", [False, True])
async def test_the_history_of_a_session_is_what_was_heard_after_one_interruption(
    local: LocalBus, bus: Client, ended: bool
) -> None:
    history = bus.session(f"livekit-{ended}")
    speaker = Speaker()
    model = livekit.LLM(bus, provider="anthropic", model="slow" if ended else "long", session=history, heard_wait_s=30)
    session = await session_with(model, speaker=speaker)
    model.listen(session)
    begun = len(local.exchanges)
    speech = session.generate_reply(user_input="What about the weather?")
    await eventually(lambda: speaker.playing)
    await eventually(lambda: model._turns._recent[-1].ended if ended else local.exchanges[begun].state == "stalled")
    await speech.interrupt()
    await eventually(lambda: model._turns._recent[-1].left and not model._turns._leaving)
    said = await history_of(history)
    assert said[0] == ("user", "What about the weather?")
    assert said[1][0] == "assistant"
    assert said[1][1].strip()
    assert HEARD.startswith(said[1][1].strip())

    speaker.playing = False
    reply = session.generate_reply(user_input="I shall be brief, too.")
    await eventually(lambda: len(local.exchanges) > begun + 1 and model._turns._recent[-1].ended)
    request = local.requests[begun + 1]
    asked = [(one["role"], one["content"][0]["text"]) for one in request["messages"]]
    assert asked == [*said, ("user", "I shall be brief, too.")]
    assert "Be brief." in str(request["system"])
    await eventually(lambda: speaker.playing)
    await reply.interrupt()
    await session.aclose()
    await model.aclose()


async def test_a_tool_of_the_agent_runs_there_and_its_result_is_in_the_session(local: LocalBus, bus: Client) -> None:
    @function_tool
    async def place(of: str) -> str:
        """Where somebody is."""
        return f"{of} is here"

    history = bus.session("livekit-tool")
    session = await session_with(livekit.LLM(bus, provider="anthropic", model="calls", session=history), place)
    await session.run(user_input="Where is Ann?")
    said = await history_of(history)
    assert [role for role, _ in said] == ["user", "assistant", "tool", "assistant"]
    assert said[-1][1] == "So: Ann is here"
    await session.aclose()


@pytest.mark.parametrize("hangs_up", [False, True])
async def test_who_leaves_before_a_word_was_spoken_heard_nothing_and_closes_the_call_at_once(
    local: LocalBus, bus: Client, hangs_up: bool
) -> None:
    model = livekit.LLM(bus, provider="anthropic", model="long", heard_wait_s=600)  # the test would not end
    session = await session_with(model, speaker=Speaker(buffers=True))
    model.listen(session)
    begun = len(local.exchanges)
    speech = session.generate_reply(user_input="What about the weather?")
    await eventually(lambda: len(local.exchanges) > begun and local.exchanges[begun].state == "stalled")
    if hangs_up:
        await session.aclose()
    else:
        await speech.interrupt()
    await gone(local, begun)
    assert [e.heard_through async for e in bus.follow(model._turns._recent[-1].run) if isinstance(e, Cancelled)] == [-1]
    await session.aclose()
    await model.aclose()


async def test_a_hang_up_in_the_middle_of_the_speech_closes_the_call_at_once(local: LocalBus, bus: Client) -> None:
    model, speaker = livekit.LLM(bus, provider="anthropic", model="long", heard_wait_s=600), Speaker()
    session = await session_with(model, speaker=speaker)
    model.listen(session)
    begun = len(local.exchanges)
    session.generate_reply(user_input="What about the weather?")
    await eventually(lambda: speaker.playing and local.exchanges[begun].state == "stalled")
    await session.aclose()
    await gone(local, begun)
    await model.aclose()


async def test_a_turn_that_livekit_requests_again_is_one_run_and_continues(
    local: LocalBus, bus: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow, broken = bus.follow, [True]

    async def breaks(run: Any, *, after: int = -1) -> AsyncGenerator[Any]:
        async for event in follow(run, after=after):
            if broken and getattr(event, "visible", False):
                yield event
                broken.clear()
                raise ServerUnavailable("redis://test", "gone for a moment")
            yield event

    monkeypatch.setattr(bus, "follow", breaks)
    model = livekit.LLM(bus, provider="anthropic", model="text")
    errors: list[Any] = []
    model.on("error", errors.append)
    begun = len(local.exchanges)
    answer = await model.chat(chat_ctx=chat_context(), conn_options=AT_ONCE).collect()
    assert answer.text == SENTENCES
    assert [error.recoverable for error in errors] == [True]
    assert len(local.exchanges) == begun + 1


async def test_a_tool_of_the_agent_runs_there_and_its_result_goes_back(local: LocalBus, bus: Client) -> None:
    requested: list[str] = []

    @function_tool
    async def place(of: str) -> str:
        """Where somebody is."""
        requested.append(of)
        return f"{of} is here"

    model = livekit.LLM(bus, provider="anthropic", model="calls")
    session = await session_with(model, place)
    result = await session.run(user_input="Where is Ann?")
    assert requested == ["Ann"]
    message: Any = result.events[-1].item
    assert message.text_content == "So: Ann is here"
    await session.aclose()


async def test_what_a_policy_replaces_is_never_spoken(local: LocalBus, bus: Client) -> None:
    model = livekit.LLM(bus, provider="anthropic", model="text", policies=["quiet"])
    answer = await model.chat(chat_ctx=chat_context()).collect()
    assert answer.text == SENTENCES.replace("umbrella", "coat")


@pytest.mark.parametrize(("name", "status"), [("failing", 400), ("cut", 502)])
async def test_a_failure_that_the_bus_has_tried_is_not_tried_again(
    local: LocalBus, bus: Client, name: str, status: int
) -> None:
    stream = livekit.LLM(bus, provider="anthropic", model=name).chat(chat_ctx=chat_context(), conn_options=AT_ONCE)
    with pytest.raises(APIStatusError) as caught:
        await stream.collect()
    assert (caught.value.status_code, caught.value.retryable) == (status, False)


async def test_text_that_may_be_taken_back_is_refused(bus: Client) -> None:
    with pytest.raises(Exception, match="takes text back"):
        livekit.LLM(bus, provider="anthropic", model="text", on_failure="restart").chat(chat_ctx=chat_context())


async def test_the_agent_of_the_guide_runs(local: LocalBus, monkeypatch: pytest.MonkeyPatch) -> None:
    class Job:
        room = NOT_GIVEN

        def __init__(self) -> None:
            self.at_the_end: list[Any] = []

        def add_shutdown_callback(self, callback: Any) -> None:
            self.at_the_end.append(callback)

    monkeypatch.setenv("TOKENBUS_REDIS_URL", local.url)
    (_, agent), guide, job, begun = python_of("livekit"), dict[str, Any](), Job(), len(local.exchanges)
    exec(agent.replace("claude-haiku-4-5", "text"), guide)
    await guide["entrypoint"](job)
    await eventually(lambda: len(local.exchanges) > begun and local.exchanges[begun].ended)
    for callback in job.at_the_end:
        await callback()


# --- LiveKit's own plug-in for OpenAI, at the gateway ------------------------------------------------------------


@pytest.fixture
async def plain(local: LocalBus) -> AsyncGenerator[Any]:
    pytest.importorskip("livekit.plugins.openai", reason="livekit-plugins-openai is not installed")
    (endpoint, _), guide = python_of("livekit"), dict[str, Any]()
    exec(endpoint.replace("http://127.0.0.1:8088", local.gateway).replace("claude-haiku-4-5", "long"), guide)
    yield guide["model"]
    await guide["model"].aclose()


async def test_livekits_own_openai_plug_in_reads_the_gateway(local: LocalBus, plain: Any) -> None:
    plain._opts.model = "anthropic/text"
    answer = await plain.chat(chat_ctx=chat_context()).collect()
    assert answer.text == SENTENCES


async def test_an_interruption_of_livekits_own_plug_in_closes_the_call_of_the_provider(
    local: LocalBus, plain: Any
) -> None:
    begun = len(local.exchanges)
    stream = plain.chat(chat_ctx=chat_context())
    await anext(aiter(stream))
    await eventually(lambda: local.exchanges[begun].state == "stalled")
    await stream.aclose()
    await gone(local, begun)


async def test_a_failure_reaches_livekits_own_plug_in_once(local: LocalBus, plain: Any) -> None:
    plain._opts.model, begun = "anthropic/failing", len(local.exchanges)
    with pytest.raises(APIStatusError):
        await plain.chat(chat_ctx=chat_context(), conn_options=AT_ONCE).collect()
    assert len(local.exchanges) == begun + 1
