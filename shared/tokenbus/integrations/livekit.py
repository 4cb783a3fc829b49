"""The model of a LiveKit agent, over the bus. Needs `livekit-agents` (extra `livekit`).

    from tokenbus.integrations import livekit

    async with Client() as bus:
        model = livekit.LLM(bus, provider="anthropic", model="claude-haiku-4-5", policies=["no_secrets"])
        session = AgentSession(llm=model, stt=…, tts=…)
        model.listen(session)

A turn is one run, also if LiveKit asks again after a lost connection. An interrupted turn is cancelled with what was
spoken of it; the next run's metadata contain it too (`heard`), as a model often ends long before the speech does.
"""

from __future__ import annotations

from typing import Any

from livekit.agents import APIConnectionError, APIStatusError, llm
from livekit.agents.types import DEFAULT_API_CONNECT_OPTIONS, NOT_GIVEN, APIConnectOptions, NotGivenOr
from livekit.agents.utils import is_given

from tokenbus.client.client import Client
from tokenbus.client.sessions.session import Session
from tokenbus.errors import RequestError, RunFailed, ServerError, TokenbusError
from tokenbus.integrations.chat_request import chat_request
from tokenbus.integrations.voice_turn import HEARD_WAIT_S, VoiceTurn, VoiceTurns

_REFUSED, _BAD_GATEWAY = 400, 502


class LLM(llm.LLM):
    """A model on the bus, for an `AgentSession` or an `Agent`."""

    def __init__(
        self,
        bus: Client,
        *,
        provider: str,
        model: str,
        session: Session | None = None,
        heard_wait_s: float = HEARD_WAIT_S,
        **fields: Any,
    ) -> None:
        """``fields``: further fields of each request: `policies`, `fallback`, `on_failure`, `temperature`, …

        ``session``: the turns are runs of it, and its history holds what was heard. ``heard_wait_s``: how long the run
        of an interrupted turn waits for LiveKit to say what was spoken.
        """
        super().__init__()
        self._bus = bus
        self._fields = {"provider": provider, "model": model, **fields}
        self._turns = VoiceTurns(bus, told_of_speech=False, heard_wait_s=heard_wait_s, session=session)

    @property
    def model(self) -> str:
        return str(self._fields["model"])

    @property
    def provider(self) -> str:
        return str(self._fields["provider"])

    def listen(self, session: Any) -> None:
        """Learn from an `AgentSession` when it speaks, what was spoken of each turn, and when it is closed."""
        self._turns.told_of_speech = True
        session.on("conversation_item_added", self._item_added)
        session.on("agent_state_changed", lambda event: self._turns.speaks(event.new_state == "speaking"))
        session.on("close", lambda event: self._turns.hang_up())

    def chat(
        self,
        *,
        chat_ctx: llm.ChatContext,
        tools: list[llm.Tool] | None = None,
        conn_options: APIConnectOptions = DEFAULT_API_CONNECT_OPTIONS,
        parallel_tool_calls: NotGivenOr[bool] = NOT_GIVEN,
        tool_choice: NotGivenOr[llm.ToolChoice] = NOT_GIVEN,
        extra_kwargs: NotGivenOr[dict[str, Any]] = NOT_GIVEN,
    ) -> LLMStream:
        """Begin a turn. ``extra_kwargs``: fields of this request alone."""
        messages, _ = chat_ctx.to_provider_format("openai")
        schemas = llm.ToolContext(tools or []).parse_function_tools("openai", strict=False)
        choice = tool_choice if is_given(tool_choice) else None
        request = {**self._fields, **chat_request(messages, schemas, choice)}
        if is_given(parallel_tool_calls) and schemas:
            request["parallel_tool_calls"] = parallel_tool_calls
        if is_given(extra_kwargs):
            request |= extra_kwargs
        turn = self._turns.begin(request)
        return LLMStream(self, self._turns, turn, chat_ctx=chat_ctx, tools=tools or [], conn_options=conn_options)

    async def aclose(self) -> None:
        await self._turns.aclose()
        await super().aclose()

    def _item_added(self, event: Any) -> None:
        item = event.item
        if isinstance(item, llm.ChatMessage) and item.role == "assistant":
            self._turns.spoken(item.text_content or "", interrupted=item.interrupted)


class LLMStream(llm.LLMStream):
    """One turn."""

    def __init__(self, model: LLM, turns: VoiceTurns, turn: VoiceTurn, **options: Any) -> None:
        self._turns = turns
        self._turn = turn
        super().__init__(model, **options)

    @property
    def run(self) -> str:
        """The id of the turn's run; in a session, once it has begun."""
        return self._turn.run

    async def aclose(self) -> None:
        await super().aclose()
        self._turns.leave(self._turn)

    async def _run(self) -> None:
        turn = self._turn
        try:
            await self._turns.ready()
            async for text in turn.texts():
                self._send(llm.ChoiceDelta(role="assistant", content=text))
        except ServerError as e:  # LiveKit retries, and the turn continues where it was
            raise APIConnectionError(str(e), retryable=True) from e
        except RequestError as e:
            raise APIStatusError(str(e), status_code=_REFUSED, body=None, retryable=False) from e
        except TokenbusError as e:  # the bus has tried again already
            status = (isinstance(e, RunFailed) and e.error.status) or _BAD_GATEWAY
            raise APIStatusError(str(e), status_code=status, request_id=turn.run, body=None, retryable=False) from e
        if turn.calls:
            self._send(llm.ChoiceDelta(role="assistant", tool_calls=[_call(call) for call in turn.calls]))
        self._event_ch.send_nowait(llm.ChatChunk(id=turn.run, usage=_usage(turn)))

    def _send(self, delta: llm.ChoiceDelta) -> None:
        self._event_ch.send_nowait(llm.ChatChunk(id=self._turn.run, delta=delta))


def _call(call: Any) -> llm.FunctionToolCall:
    name, arguments = call.tool_name or "", call.arguments or "{}"
    return llm.FunctionToolCall(name=name, arguments=arguments, call_id=call.tool_id or f"call_{call.block}")


def _usage(turn: VoiceTurn) -> llm.CompletionUsage:
    usage = turn.usage
    prompt, completion = usage.input or 0, usage.output or 0
    return llm.CompletionUsage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        prompt_cached_tokens=usage.cache_read or 0,
        cache_read_tokens=usage.cache_read or 0,
        cache_creation_tokens=usage.cache_write or 0,
        reasoning_tokens=usage.reasoning or 0,
        total_tokens=usage.total or prompt + completion,
    )
