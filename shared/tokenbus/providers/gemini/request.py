"""Builds a Gemini request: https://ai.google.dev/api/generate-content.

Adjacent messages of one role are merged. All system text goes to `systemInstruction`, its only place in this API. The
API has no fields for participant names or cache marks; it caches automatically.
"""

from __future__ import annotations

import re
from urllib.parse import quote

from tokenbus.errors import RequestInvalid
from tokenbus.events.quirks import begins_with, segment_problem
from tokenbus.events.requests import Effort, Generate, Message, TextPart, ToolChoice
from tokenbus.providers.api import Built, Quirks
from tokenbus.providers.gemini.contents import Contents
from tokenbus.providers.request.build import (
    BUDGETS,
    accepted_stops,
    budget_of,
    effort_note,
    given,
    json_call,
    nearest_effort,
    needs_tools,
    system_texts,
    with_extra,
    with_own,
)
from tokenbus.providers.request.conversation import Takes, conversation
from tokenbus.providers.request.images import image_options

MAX_STOP_STRINGS = 5
EFFORTS: tuple[Effort, ...] = ("minimal", "low", "medium", "high", "xhigh")
_COLLECTION = re.compile(
    r"(?:(?:projects/[\w-]+/locations/[\w-]+/)?publishers/[\w-]+/models|(?:projects/[\w-]+/locations/[\w-]+/)?endpoints"
    r"|models|tunedModels)",
    re.ASCII,
)
"""Allowed prefixes of a model's name: https://cloud.google.com/vertex-ai/generative-ai/docs/model-reference/inference.
"""


def build(request: Generate, history: list[Message], quirks: Quirks) -> Built:
    """Build the HTTP call for the next turn. Raises RequestInvalid, naming the field."""
    takes = Takes(api="gemini", thinking=("thought_signature",), model_images=True)
    spoken, notes = conversation(request, history, takes)
    system = system_texts(request.system)
    contents = Contents(sign_calls=not begins_with(request.model, quirks.models_without_signatures))
    for message in spoken:
        if message.role == "system":
            if contents.turns:
                notes += (f"{message.where}: system text was moved to the front, its only place in this API",)
            system += [part.text for part in message.parts if isinstance(part, TextPart)]
        else:
            contents.add(message)
    if not contents.turns:
        raise RequestInvalid("messages", "none of them has content that this provider accepts")
    body: dict[str, object] = {"contents": contents.turns}
    if system:
        body["systemInstruction"] = {"parts": [{"text": text} for text in system]}
    if generation := generation_of(request, quirks):
        body["generationConfig"] = generation
    budgets = begins_with(request.model, quirks.models_with_budgets)
    notes += effort_note(request.thinking, BUDGETS if budgets else EFFORTS)
    return built(body | _tools(request), request, notes)


def built(body: dict[str, object], request: Generate, notes: tuple[str, ...]) -> Built:
    """Build the call with this body. Model and method are part of its path."""
    method, query = ("streamGenerateContent", {"alt": "sse"}) if request.stream else ("generateContent", {})
    call = json_call(f"/{_place(request.model)}:{method}", with_extra(body, request.extra), query)
    return Built(call=call, notes=notes)


def _place(model: str) -> str:
    """The path of the model: one segment under one of the known collections, so it cannot lead elsewhere.

    Raises RequestInvalid.
    """
    *collection, name = model.strip().removeprefix("models/").split("/")
    if (problem := segment_problem(name)) or (collection and not _COLLECTION.fullmatch("/".join(collection))):
        raise RequestInvalid("model", problem or "not a valid model path")
    return "/".join([*(collection or ["models"]), quote(name, safe="")])


def max_stops(quirks: Quirks) -> int:
    """The number of stop strings that the API accepts."""
    return MAX_STOP_STRINGS if quirks.max_stop_strings is None else quirks.max_stop_strings


def generation_of(request: Generate, quirks: Quirks) -> dict[str, object]:
    """Output limit and format, thinking, sampling and stop strings."""
    payload: dict[str, object] = {}
    if request.output_schema:
        payload |= {"responseMimeType": "application/json", "responseJsonSchema": request.output_schema.schema}
    elif request.json_object:
        payload["responseMimeType"] = "application/json"
    payload |= given(
        {
            "maxOutputTokens": request.max_tokens,
            "temperature": request.temperature,
            "topP": request.top_p,
            "topK": request.top_k,
            "seed": request.seed,
            "frequencyPenalty": request.frequency_penalty,
            "presencePenalty": request.presence_penalty,
            "stopSequences": accepted_stops(request.stop, max_stops(quirks)) or None,
        }
    )
    if images := image_options(request, "size", "aspect_ratio"):
        payload["responseModalities"] = ["TEXT", "IMAGE"]
        form = {"aspectRatio": images.aspect_ratio, "imageSize": images.size}
        if form := {name: value for name, value in form.items() if value}:
            payload["imageConfig"] = form
    thinking = request.thinking
    if thinking and not thinking.wanted:
        payload["thinkingConfig"] = {"thinkingBudget": 0}
    elif thinking:
        # Budget and level are mutually exclusive. All generations accept a budget; older ones do not accept a level.
        config: dict[str, object] = {}
        if thinking.budget_tokens or begins_with(request.model, quirks.models_with_budgets):
            config = {"thinkingBudget": budget} if (budget := budget_of(thinking)) else {}
        elif thinking.effort:
            config = {"thinkingLevel": nearest_effort(thinking.effort, EFFORTS).upper()}
        payload["thinkingConfig"] = {"includeThoughts": thinking.display != "omitted", **config}
    return payload


def _tools(request: Generate) -> dict[str, object]:
    payload: dict[str, object] = {}
    if request.tools:
        declared = [
            with_own(
                {"name": tool.name}
                | ({"description": tool.description} if tool.description else {})
                | ({"parametersJsonSchema": tool.parameters} if tool.parameters else {}),
                tool.extra,
                "gemini",
            )
            for tool in request.tools
        ]
        payload["tools"] = [{"functionDeclarations": declared}]
    choice = request.tool_choice
    if needs_tools(request) and choice is not None:
        named = isinstance(choice, ToolChoice)
        calling: dict[str, object] = {"mode": "ANY" if named else choice.upper()}
        if named:
            calling["allowedFunctionNames"] = [choice.name]
        payload["toolConfig"] = {"functionCallingConfig": calling}
    return payload
