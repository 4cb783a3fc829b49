"""The model of a Pipecat pipeline, over the bus. Needs `pipecat-ai` (extra `pipecat`).

    from tokenbus.integrations.pipecat import TokenbusLLMService

    async with Client() as bus:
        model = TokenbusLLMService(bus, provider="anthropic", model="claude-haiku-4-5", policies=["no_secrets"])
        pipeline = Pipeline([…, aggregators.user(), model, tts, transport.output(), aggregators.assistant()])

An interrupted turn is cancelled with what was spoken of it: the assistant's aggregator reports that upstream. The next
run's metadata contain it too (`heard`), as a model often ends long before the speech does.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from pipecat.frames.frames import (
    BotStartedSpeakingFrame,
    BotStoppedSpeakingFrame,
    CancelFrame,
    EndFrame,
    Frame,
    FunctionCallFromLLM,
    InterruptionFrame,
    LLMContextAssistantTurnFrame,
    LLMContextFrame,
    LLMFullResponseEndFrame,
    LLMFullResponseStartFrame,
)
from pipecat.metrics.metrics import LLMTokenUsage
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.frame_processor import FrameDirection
from pipecat.services.llm_service import LLMService
from pipecat.services.settings import LLMSettings

from tokenbus.client.client import Client
from tokenbus.client.sessions.session import Session
from tokenbus.errors import TokenbusError
from tokenbus.integrations.chat_request import chat_request
from tokenbus.integrations.voice_turn import HEARD_WAIT_S, VoiceTurn, VoiceTurns

_SETTINGS = ("temperature", "max_tokens", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed")
"""Pipecat's settings that a request of the bus has under the same name."""


class TokenbusLLMService(LLMService[Any]):
    """A model on the bus, for a pipeline."""

    def __init__(
        self,
        bus: Client,
        *,
        provider: str,
        model: str,
        system_instruction: str | None = None,
        session: Session | None = None,
        heard_wait_s: float = HEARD_WAIT_S,
        **fields: Any,
    ) -> None:
        """``fields``: further fields of each request: `policies`, `fallback`, `on_failure`, `thinking`, …

        ``session``: the turns are runs of it, and its history holds what was heard. ``heard_wait_s``: how long the run
        of an interrupted turn waits for the assistant's aggregator to say what was spoken.
        """
        unset: dict[str, Any] = dict.fromkeys(_SETTINGS)
        settings = LLMSettings(
            model=model,
            system_instruction=system_instruction,
            filter_incomplete_user_turns=False,
            user_turn_completion_config=None,
            **{**unset, **{name: fields.pop(name) for name in _SETTINGS if name in fields}},
        )
        super().__init__(settings=settings)
        self._bus = bus
        self._fields = {"provider": provider, **fields}
        self._turns = VoiceTurns(bus, told_of_speech=True, heard_wait_s=heard_wait_s, session=session)
        self._interrupted = False
        """Since the bot began to speak."""

    def can_generate_metrics(self) -> bool:
        return True

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        if isinstance(frame, CancelFrame | EndFrame):
            self._turns.hang_up()
        await super().process_frame(frame, direction)
        if isinstance(frame, BotStartedSpeakingFrame | BotStoppedSpeakingFrame):
            self._turns.speaks(speaks := isinstance(frame, BotStartedSpeakingFrame))
            self._interrupted = self._interrupted and not speaks
        if isinstance(frame, InterruptionFrame):
            self._interrupted = True
        if isinstance(frame, LLMContextAssistantTurnFrame):
            self._turns.spoken(frame.text, interrupted=self._interrupted)
        if not isinstance(frame, LLMContextFrame):
            await self.push_frame(frame, direction)
            return
        try:
            await self.push_frame(LLMFullResponseStartFrame())
            await self.start_processing_metrics()
            await self._answer(frame.context)
        except TokenbusError as e:
            await self.push_error(error_msg=f"Error during completion: {e}", exception=e)
        finally:
            await self.stop_processing_metrics()
            await self.push_frame(LLMFullResponseEndFrame())

    async def run_inference(
        self,
        context: LLMContext,
        max_tokens: int | None = None,
        system_instruction: str | None = None,
        response_schema: dict[str, Any] | None = None,
    ) -> str | None:
        """Answer outside the pipeline: nothing of the run is visible to subscribers."""
        self._check_response_schema(response_schema)
        request = await self._request(context, system_instruction)
        request["visible"] = False
        if max_tokens is not None:
            request["max_tokens"] = max_tokens
        return (await self._bus.result(await self._bus.publish(request))).text

    async def cleanup(self) -> None:
        await self._turns.aclose()
        await super().cleanup()

    async def _answer(self, context: LLMContext) -> None:
        turn = self._turns.begin(await self._request(context))
        await self.start_ttfb_metrics()
        try:
            await self._turns.ready()
            async for text in turn.texts():
                await self.stop_ttfb_metrics()
                await self._push_llm_text(text)
        except asyncio.CancelledError:  # an interruption
            self._turns.leave(turn)
            raise
        await self.start_llm_usage_metrics(_usage(turn))
        if turn.calls:
            await self.run_function_calls([_call(call, context) for call in turn.calls])

    async def _request(self, context: LLMContext, system_instruction: str | None = None) -> dict[str, Any]:
        instruction = system_instruction or self._settings.system_instruction
        params: Any = await self.get_llm_adapter().get_llm_invocation_params(
            context, system_instruction=instruction or None, convert_developer_to_user=False
        )
        tools, choice = _given(params.get("tools")) or [], _given(params.get("tool_choice"))
        settings = {name: value for name in _SETTINGS if (value := getattr(self._settings, name, None)) is not None}
        model = {"model": self._settings.model}
        return {**self._fields, **model, **settings, **chat_request(params["messages"], tools, choice)}


def _given(value: Any) -> Any:
    """OpenAI's sentinel for "not given" is not a value."""
    return value if isinstance(value, list | dict | str) else None


def _call(call: Any, context: LLMContext) -> FunctionCallFromLLM:
    # Arguments that are not a JSON object: the handler is called without any, and its schema decides.
    arguments = call.input if call.input is not None else json.loads("{}")
    tool_id = call.tool_id or f"call_{call.block}"
    return FunctionCallFromLLM(
        context=context, tool_call_id=tool_id, function_name=call.tool_name or "", arguments=arguments
    )


def _usage(turn: VoiceTurn) -> LLMTokenUsage:
    usage = turn.usage
    prompt, completion = usage.input or 0, usage.output or 0
    return LLMTokenUsage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=usage.total or prompt + completion,
        cache_read_input_tokens=usage.cache_read,
        cache_creation_input_tokens=usage.cache_write,
        reasoning_tokens=usage.reasoning,
    )
