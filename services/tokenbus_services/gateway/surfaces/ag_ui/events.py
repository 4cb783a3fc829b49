"""AG-UI's events as bytes. Pure. Which of them a run needs, and when, is the encoder's."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from tokenbus.events.public import AudioRef, ImageRef, Waiting
from tokenbus.events.usage import Usage
from tokenbus_services.gateway.surfaces.ag_ui.history import METADATA, Json, SentBlock, parent_of
from tokenbus_services.gateway.surfaces.contract import encode_line, wait_name


class EventWriter:
    """Writes the events of one stream. ``thread`` and ``client_run``: the client's ids."""

    def __init__(self, run: str, *, thread: str, client_run: str, model: str) -> None:
        self.seq = -1
        """The seq of the public event that is being encoded; each AG-UI event names it."""
        self._run = run
        self._thread = thread
        self._client_run = client_run
        self._model = model
        self._out: list[bytes] = []

    def taken(self) -> list[bytes]:
        """The events written since the last call."""
        out, self._out = self._out, []
        return out

    def discard(self) -> None:
        """Drop the events written since the last `taken`."""
        self._out.clear()

    # --- the run ------------------------------------------------------------------------------------------------

    def run_started(self) -> None:
        """The stream begins."""
        self._emit("RUN_STARTED", threadId=self._thread, runId=self._client_run, metadata=self._metadata(run=self._run))

    def step_started(self, turn: int) -> None:
        self._emit("STEP_STARTED", stepName=_step(turn))

    def step_finished(self, turn: int) -> None:
        self._emit("STEP_FINISHED", stepName=_step(turn))

    def snapshot(self, messages: list[Json]) -> None:
        """These messages replace all that the client has."""
        self._emit("MESSAGES_SNAPSHOT", messages=messages)

    def run_finished(self, outcome: Json, usage: Usage | None) -> None:
        """The run ended as it should, or was cancelled."""
        more = {"usage": self.usage(usage)} if usage else {}
        self._emit("RUN_FINISHED", threadId=self._thread, runId=self._client_run, outcome=outcome, **more)

    def run_error(self, message: str, code: str, usage: Usage | None = None) -> None:
        """The run failed, or its stream broke."""
        self._emit("RUN_ERROR", message=message, code=code, **({"usage": self.usage(usage)} if usage else {}))

    # --- blocks -------------------------------------------------------------------------------------------------

    def block_start(self, sent: SentBlock, known: Iterable[SentBlock]) -> None:
        """A block begins. ``known``: the blocks that the client knows; a call belongs to the message of one."""
        match sent.kind:
            case "text":
                self._emit("TEXT_MESSAGE_START", messageId=sent.id, role="assistant")
            case "thinking":
                self._emit("REASONING_START", messageId=sent.id)
                self._emit("REASONING_MESSAGE_START", messageId=sent.id, role="reasoning")
            case _:
                parent = parent_of(self._run, sent.turn, known)
                self._emit("TOOL_CALL_START", toolCallId=sent.id, toolCallName=sent.name, parentMessageId=parent)

    def block_content(self, sent: SentBlock, delta: str) -> None:
        match sent.kind:
            case "text":
                self._emit("TEXT_MESSAGE_CONTENT", messageId=sent.id, delta=delta)
            case "thinking":
                self._emit("REASONING_MESSAGE_CONTENT", messageId=sent.id, delta=delta)
            case _:
                self._emit("TOOL_CALL_ARGS", toolCallId=sent.id, delta=delta)

    def block_end(self, sent: SentBlock) -> None:
        """A block ends, with what the provider wants back with it."""
        match sent.kind:
            case "text":
                self._emit("TEXT_MESSAGE_END", messageId=sent.id)
                self._encrypted("message", sent)
            case "thinking":
                self._emit("REASONING_MESSAGE_END", messageId=sent.id)
                self._encrypted("message", sent)
                self._emit("REASONING_END", messageId=sent.id)
            case _:
                self._emit("TOOL_CALL_END", toolCallId=sent.id)
                self._encrypted("tool-call", sent)

    def tool_result(self, sent: SentBlock) -> None:
        failed = {"is_error": True} if sent.failed else {}  # the event has no field for it
        self._emit(
            "TOOL_CALL_RESULT",
            messageId=sent.id,
            toolCallId=sent.call,
            content=sent.content,
            role="tool",
            metadata=self._metadata(**failed),
        )

    def void_call(self, sent: SentBlock) -> None:
        """Answer a call that is void; else the client counts it as pending."""
        call = {"toolCallId": sent.id, "content": "void"}
        self._emit("TOOL_CALL_RESULT", messageId=f"{self._run}:{sent.block}", role="tool", **call)

    # --- events of ours -----------------------------------------------------------------------------------------

    def activity(self, activity: str, tool: str, content: Json) -> None:
        """What a provider's tool does, in place of what the client has of it."""
        kind = f"{METADATA}.{tool}"
        self._emit("ACTIVITY_SNAPSHOT", messageId=activity, activityType=kind, content=content, replace=True)

    def media(self, name: str, block: int, media: ImageRef | AudioRef, **more: object) -> None:
        """An image, a preview of one, or a sound."""
        value: Json = {"block": block, "mediaType": media.media_type, **more}
        if media.base64 is not None:
            value["data"] = media.base64
        elif media.blob_id:
            value["blobId"] = media.blob_id
        self.custom(name, value)

    def custom(self, name: str, value: object) -> None:
        """An event that AG-UI does not know."""
        self._emit("CUSTOM", name=f"{METADATA}.{name}", value=value)

    def usage(self, usage: Usage) -> list[Json]:
        """Token counts in AG-UI's form."""
        counts = {
            "inputTokens": usage.input,
            "outputTokens": usage.output,
            "totalTokens": usage.total,
            "reasoningTokens": usage.reasoning,
            "cachedInputTokens": usage.cache_read,
            "cacheWriteInputTokens": usage.cache_write,
        }
        return [{"model": self._model, **{name: count for name, count in counts.items() if count is not None}}]

    def _encrypted(self, subtype: str, sent: SentBlock) -> None:
        if sent.encrypted:
            self._emit("REASONING_ENCRYPTED_VALUE", subtype=subtype, entityId=sent.id, encryptedValue=sent.encrypted)

    def _metadata(self, **more: object) -> Json:
        return {METADATA: {"seq": self.seq, **more}}

    def _emit(self, event_type: str, **fields: object) -> None:
        # A client rejects an event with a null in it, and splits the stream at two line feeds alone.
        event = {"type": event_type, **fields}
        event.setdefault("metadata", self._metadata())
        self._out.append(b"data: " + encode_line(event) + b"\n\n")


def interrupt(run: str, wait: Waiting) -> Json:
    """What a run waits for, as the client reads it."""
    until = datetime.fromtimestamp(wait.deadline_ms / 1000, UTC).isoformat(timespec="milliseconds")
    asked: Json = {
        "id": wait_name(run, wait.wait),
        "toolCallId": wait.tool_id,
        "expiresAt": until.replace("+00:00", "Z"),
    }
    if wait.what == "answer":
        about: Json = {"reason": "input_required", "message": wait.text or wait.tool_name}
        if wait.url is not None:
            about["metadata"] = {METADATA: {"url": wait.url}}
        return {**asked, **about, "responseSchema": wait.schema or {"type": "object"}}
    answers: Json = {"approved": {"type": "boolean"}, "reason": {"type": "string"}}
    if wait.schema is not None:
        answers["editedArgs"] = wait.schema
    schema: Json = {"type": "object", "properties": answers, "required": ["approved"]}
    return {**asked, "reason": "tool_call", "message": f"May {wait.tool_name} run?", "responseSchema": schema}


def _step(turn: int) -> str:
    return f"turn {turn}"
