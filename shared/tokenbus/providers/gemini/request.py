"""Build a Gemini request: https://ai.google.dev/api/generate-content.

Neighbouring messages of one role become one. System text of any place goes to `systemInstruction`, for the API has no
other. It has no fields for a participant's name and for cache marks: it caches by itself.
"""

from __future__ import annotations

import re
from urllib.parse import quote

import msgspec

from tokenbus.errors import RequestInvalid
from tokenbus.events.model_names import begins_with, segment_problem
from tokenbus.events.requests import Generate, Message, TextPart, ToolChoice
from tokenbus.providers.api import Built, HttpCall, Quirks
from tokenbus.providers.gemini.contents import Contents
from tokenbus.providers.request.build import budget_of, needs_tools, told_stops, with_extra
from tokenbus.providers.request.conversation import Takes, conversation
from tokenbus.providers.request.images import image_options

MAX_STOP_STRINGS = 5
_COLLECTION = re.compile(
    r"(?:(?:projects/[\w-]+/locations/[\w-]+/)?publishers/[\w-]+/models|(?:projects/[\w-]+/locations/[\w-]+/)?endpoints"
    r"|models|tunedModels)",
    re.ASCII,
)
"""What may stand before a model's name: https://cloud.google.com/vertex-ai/generative-ai/docs/model-reference/inference."""


def build(request: Generate, history: list[Message], quirks: Quirks) -> Built:
    """The HTTP call for the next turn. Raises RequestInvalid, naming the field."""
    takes = Takes(api="gemini", thinking=("thought_signature",), model_images=True)
    spoken, notes = conversation(request, history, takes)
    system = _texts(request.system) if request.system else []
    contents = Contents(sign_calls=not begins_with(request.model, quirks.models_without_signatures))
    for message in spoken:
        if message.role == "system":
            if contents.said:
                notes += (f"{message.where}: system text was moved to the front, where the API has its only place",)
            system += [part.text for part in message.parts if isinstance(part, TextPart)]
        else:
            contents.add(message)
    if not contents.said:
        raise RequestInvalid("messages", "they hold nothing that this provider takes as a message")
    body: dict[str, object] = {"contents": contents.said}
    if system:
        body["systemInstruction"] = {"parts": [{"text": text} for text in system]}
    if generation := generation_of(request, quirks):
        body["generationConfig"] = generation
    return built(body | _tools(request), request, notes)


def built(body: dict[str, object], request: Generate, notes: tuple[str, ...]) -> Built:
    """The call with this body: model and method stand in its path."""
    method, query = ("streamGenerateContent", {"alt": "sse"}) if request.stream else ("generateContent", {})
    call = HttpCall(
        path=f"/{_place(request.model)}:{method}",
        query=query,
        body=msgspec.json.encode(with_extra(body, request.extra)),
        headers={"content-type": "application/json"},
    )
    return Built(call=call, notes=notes)


def _place(model: str) -> str:
    """The model's place in the path. Its name is one segment, so that it cannot lead elsewhere, under one of the
    collections that there are. Raises RequestInvalid."""
    *collection, name = model.strip().removeprefix("models/").split("/")
    if (problem := segment_problem(name)) or (collection and not _COLLECTION.fullmatch("/".join(collection))):
        raise RequestInvalid("model", problem or "its path is none of a model")
    return "/".join([*(collection or ["models"]), quote(name, safe="")])


def most_stops(quirks: Quirks) -> int:
    """How many stop strings the API takes."""
    return MAX_STOP_STRINGS if quirks.max_stop_strings is None else quirks.max_stop_strings


def _texts(system: str | list[TextPart]) -> list[str]:
    return [system] if isinstance(system, str) else [part.text for part in system if part.text]


def generation_of(request: Generate, quirks: Quirks) -> dict[str, object]:
    """Output limit and form, thinking, sampling and stop strings."""
    said: dict[str, object] = {}
    if request.output_schema:
        said |= {"responseMimeType": "application/json", "responseJsonSchema": request.output_schema.schema}
    if request.max_tokens is not None:
        said["maxOutputTokens"] = request.max_tokens
    if request.temperature is not None:
        said["temperature"] = request.temperature
    if request.top_p is not None:
        said["topP"] = request.top_p
    if stop := told_stops(request.stop, most_stops(quirks)):
        said["stopSequences"] = stop
    if images := image_options(request, "size", "aspect_ratio"):
        said["responseModalities"] = ["TEXT", "IMAGE"]
        form = {"aspectRatio": images.aspect_ratio, "imageSize": images.size}
        if form := {name: value for name, value in form.items() if value}:
            said["imageConfig"] = form
    thinking = request.thinking
    if thinking and not thinking.enabled:
        said["thinkingConfig"] = {"thinkingBudget": 0}
    elif thinking:
        # A budget and a level exclude each other; models of all generations take a budget, older ones no level.
        asked: dict[str, object] = {}
        if thinking.budget_tokens or begins_with(request.model, quirks.models_with_budgets):
            asked = {"thinkingBudget": budget} if (budget := budget_of(thinking)) else {}
        elif thinking.effort:
            asked = {"thinkingLevel": thinking.effort.upper()}
        said["thinkingConfig"] = {"includeThoughts": True, **asked}
    return said


def _tools(request: Generate) -> dict[str, object]:
    said: dict[str, object] = {}
    if request.tools:
        declared = [
            {"name": tool.name}
            | ({"description": tool.description} if tool.description else {})
            | ({"parametersJsonSchema": tool.parameters} if tool.parameters else {})
            for tool in request.tools
        ]
        said["tools"] = [{"functionDeclarations": declared}]
    choice = request.tool_choice
    if needs_tools(request) and choice is not None:
        named = isinstance(choice, ToolChoice)
        calling: dict[str, object] = {"mode": "ANY" if named else choice.upper()}
        if named:
            calling["allowedFunctionNames"] = [choice.name]
        said["toolConfig"] = {"functionCallingConfig": calling}
    return said
