"""Builds a request of the Interactions API: https://ai.google.dev/api/interactions-api.

The conversation is a list of steps, sent whole with each turn: interactions are not stored unless `extra` says so. All
system text goes to `system_instruction`. The API has no field for participant names, a thinking budget (it becomes a
level), parallel calls or cache marks; it caches automatically.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import msgspec

from tokenbus.errors import RequestInvalid
from tokenbus.events import requests
from tokenbus.providers.api import Built, HttpCall, JobApi, JobSeen, Quirks
from tokenbus.providers.base import JobBase
from tokenbus.providers.gemini.contents import arguments_of, media_type_of
from tokenbus.providers.gemini.request import EFFORTS, max_stops
from tokenbus.providers.gemini_interactions.stream import API, CONTINUATION
from tokenbus.providers.request.build import (
    accepted_stops,
    deep_merged,
    effort_note,
    effort_of,
    given,
    json_call,
    nearest_effort,
    needs_tools,
    system_texts,
    with_extra,
    with_own,
)
from tokenbus.providers.request.conversation import Spoken, Takes, conversation, own_extra, raw_json
from tokenbus.providers.request.images import image_options

RUNNING = ("queued", "in_progress", "")


class _Interaction(msgspec.Struct):
    id: str = ""
    status: str = ""


class _Event(_Interaction):
    """An event of the stream, or an interaction, which has no type."""

    event_type: str = ""
    interaction: _Interaction | None = None


_event = msgspec.json.Decoder(_Event)


class InteractionJobs(JobBase):
    """Interactions in the background: https://ai.google.dev/gemini-api/docs/background-execution.

    A stream can be read on from `last_event_id`, but its events need not have an id. So one that was cut is looked at
    until it has ended, and the decoder emits the steps that the stream lacked.
    """

    path = "/interactions"
    resumes = False

    def read(self, data: bytes) -> JobSeen:
        """See `JobApi.read`. Events have no numbers."""
        try:
            event = _event.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return JobSeen()
        seen = event.interaction or event
        over = event.event_type in ("", "interaction.completed") and bool(seen.id) and seen.status not in RUNNING
        return JobSeen(seen.id, over=over, failed=event.event_type == "error")

    def resume(self, job: str, after: int) -> HttpCall:
        return self.look(job, stream="true")

    def last_event(self, response: bytes) -> bytes:
        interaction = msgspec.json.format(response, indent=-1)
        return b'event: interaction.completed\ndata: {"interaction":%b,"event_type":"interaction.completed"}\n\n' % (
            interaction
        )


jobs: JobApi = InteractionJobs()


Json = dict[str, object]
Steps = list[Json | msgspec.Raw]
LEAST: requests.Effort = "minimal"
"""The level for a request without thinking: the API cannot turn it off."""


def build(request: requests.Generate, history: list[requests.Message], quirks: Quirks) -> Built:
    """Build the HTTP call for the next turn. Raises RequestInvalid, naming the field."""
    extra = request.extra or {}
    takes = Takes(api=API, thinking=("thought_signature",), model_images=True, unique_ids=True)
    spoken, notes = conversation(request, history, takes)
    token, spoken = _continued(spoken)
    system = system_texts(request.system)
    steps: Steps = []
    for message in spoken:
        if message.role == "system":
            if steps:
                notes += (f"{message.where}: system text was moved to the front, its only place in this API",)
            system += [part.text for part in message.parts if isinstance(part, requests.TextPart)]
        else:
            steps += _steps(message, steps)
    if not steps:
        raise RequestInvalid("messages", "none of them has content that this provider accepts")
    body: Json = {"model": request.model, "input": steps, "stream": request.stream, "store": jobs.wanted(request)}
    if "agent" in extra:
        del body["model"]
    if token:
        body["continuation_token"] = token
    if system:
        body["system_instruction"] = "\n\n".join(system)
    if request.tools:
        body["tools"] = [
            with_own(
                {"type": "function", "name": tool.name}
                | ({"description": tool.description} if tool.description else {})
                | ({"parameters": tool.parameters} if tool.parameters else {}),
                tool.extra,
                API,
            )
            for tool in request.tools
        ]
    if generation := _generation(request, quirks):
        body["generation_config"] = generation
    body |= _format(request)
    if request.thinking and not request.thinking.wanted:
        notes += (f"thinking: this API cannot turn it off; its least level, {LEAST!r}, was asked for",)
    notes += effort_note(request.thinking, EFFORTS)
    return Built(call=json_call("/interactions", with_extra(body, extra)), notes=notes)


def _continued(spoken: list[Spoken]) -> tuple[str, list[Spoken]]:
    """The token of an interaction that paused last, and the conversation without what it said: the token stands for
    that.
    """
    token = ""
    before = len(spoken)
    while before and spoken[before - 1].role == "assistant" and spoken[before - 1].where.startswith("history"):
        before -= 1
    for message in spoken[before:]:
        for part in message.parts:
            if isinstance(part, requests.ExtraPart) and part.name == CONTINUATION:
                with suppress(msgspec.MsgspecError, UnicodeError, RecursionError):
                    token = msgspec.json.decode(part.json, type=str)
    return (token, spoken[:before]) if token else ("", spoken)


def _generation(request: requests.Generate, quirks: Quirks) -> Json:
    """Output limit, thinking, sampling, stop strings and the choice of a tool."""
    choice = request.tool_choice if needs_tools(request) else None
    fields: Json = {
        "max_output_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "seed": request.seed,
        "stop_sequences": accepted_stops(request.stop, max_stops(quirks)) or None,
        "tool_choice": {"allowed_tools": {"mode": "any", "tools": [choice.name]}}
        if isinstance(choice, requests.ToolChoice)
        else choice,
    }
    thinking = request.thinking
    if thinking and not thinking.wanted:
        fields["thinking_level"] = LEAST
    elif thinking:
        effort = effort_of(thinking)
        fields["thinking_level"] = nearest_effort(effort, EFFORTS) if effort else None
        fields["thinking_summaries"] = "none" if thinking.display == "omitted" else "auto"
    return given(fields)


def _format(request: requests.Generate) -> Json:
    """The form of the answer: JSON, or text with images."""
    if images := image_options(request, "size", "aspect_ratio"):
        form = {"type": "image", "aspect_ratio": images.aspect_ratio, "image_size": images.size}
        return {"response_format": [{"type": "text"}, {name: value for name, value in form.items() if value}]}
    json = {"type": "text", "mime_type": "application/json"}
    if request.output_schema:
        return {"response_format": json | {"schema": request.output_schema.schema}}
    return {"response_format": json} if request.json_object else {}


# The conversation as steps.


def _steps(message: Spoken, before: Sequence[Json | msgspec.Raw]) -> Steps:
    """The steps of one message. Neighbouring texts and images are one step. Raises RequestInvalid."""
    steps: Steps = []
    kind = "model_output" if message.role == "assistant" else "user_input"
    content: list[Json] | None = None
    for i, part in enumerate(message.parts):
        where = f"{message.where}.content[{i}]"
        match part:
            case requests.TextPart() | requests.ImagePart() | requests.DocumentPart():
                if content is None:
                    content = []
                    steps.append(deep_merged({"type": kind}, message.extra) | {"content": content})
                content.append(_content(part, where))
                continue
            case requests.ThinkingPart():
                signed: Json = {"type": "thought", "signature": (part.opaque or {}).get("thought_signature", "")}
                steps.append(signed | ({"summary": [{"type": "text", "text": part.text}]} if part.text else {}))
            case requests.ToolCallPart():
                called: Json = {"type": "function_call", "id": part.tool_id, "name": part.tool_name}
                signature = (part.opaque or {}).get("thought_signature")
                called |= {"arguments": arguments_of(part)} | ({"signature": signature} if signature else {})
                steps.append(with_own(called, part.extra, API))
            case requests.ToolResultPart():
                steps.append(_result(part, before, where))
            case requests.ExtraPart():
                if part.name != CONTINUATION and (raw := own_extra(part, API, where)) is not None:
                    steps.append(raw)
        content = None
    return steps


def _content(part: requests.TextPart | requests.ImagePart | requests.DocumentPart, where: str) -> Json:
    if not isinstance(part, requests.TextPart):
        return with_own(_media(part), part.extra, API)
    citations = (part.opaque or {}).get("citations")
    cited: Json = {"annotations": raw_json(citations, f"{where}.opaque.citations")} if citations else {}
    return with_own({"type": "text", "text": part.text} | cited, part.extra, API)


def _media(part: requests.ImagePart | requests.DocumentPart) -> Json:
    """Media inlined in the request or named by address. A media type that a URL does not show is not sent."""
    source = part.source
    assert not isinstance(source, requests.BlobSource)  # conversation() rejects these
    if isinstance(source, requests.Base64Source):
        media_type, place = source.media_type, {"data": source.data}
    elif isinstance(source, requests.FileSource):
        media_type, place = source.media_type, {"uri": source.file_id}
    else:
        media_type, place = media_type_of(source), {"uri": source.url}
    kind = "image" if isinstance(part, requests.ImagePart) else (media_type or "").partition("/")[0]
    kind = kind if kind in ("image", "audio", "video") else "document"
    return {"type": kind, **({"mime_type": media_type} if media_type else {}), **place}


def _result(part: requests.ToolResultPart, before: Sequence[Json | msgspec.Raw], where: str) -> Json:
    name = next(
        step["name"]
        for step in reversed(before)
        if isinstance(step, dict) and step.get("type") == "function_call" and step["id"] == part.tool_id
    )  # conversation() guarantees the call
    content: list[requests.ContentPart] | str = part.content if isinstance(part.content, str) else list(part.content)
    if isinstance(content, list):
        result: object = [
            _content(inner, where) for inner in content if isinstance(inner, requests.TextPart | requests.ImagePart)
        ]
    else:
        result = content
    payload: Json = {"type": "function_result", "call_id": part.tool_id, "name": name, "result": result}
    return with_own(payload | ({"is_error": True} if part.is_error else {}), part.extra, API)
