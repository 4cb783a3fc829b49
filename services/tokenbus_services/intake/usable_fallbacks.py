"""Decides, when a run is accepted, which settings apply, which fallbacks it may use, and which images it may hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from tokenbus.blobs import plain_media_type
from tokenbus.core.image_header import decoded_size
from tokenbus.core.request.bounds import tenant_of
from tokenbus.core.request.validate import request_for
from tokenbus.errors import RequestInvalid, SettingsError, TokenbusError
from tokenbus.events.quirks import names_model
from tokenbus.events.requests import (
    Base64Source,
    BlobSource,
    ContentPart,
    Fallback,
    FileSource,
    Generate,
    ImagePart,
    Message,
    Source,
    TextPart,
    ToolResultPart,
)
from tokenbus.providers.api import Built
from tokenbus.providers.media import MediaLimits
from tokenbus_services.media.locate import Media, media_of, request_with
from tokenbus_services.media.provider_limits import check_media, limits_of, takes_type
from tokenbus_services.settings import FallbackChoice, FallbackRoute, ProviderSettings

_STUB = "eA=="
"""A stub for media whose content no request builder reads."""


class Callee(Protocol):
    """A configured provider."""

    @property
    def settings(self) -> ProviderSettings: ...
    def build(self, request: Generate, history: list[Message]) -> Built: ...


class Fallbacks:
    """The deployment's fallback routes, checked against its providers."""

    def __init__(self, routes: tuple[FallbackRoute, ...], providers: Callable[[str], Callee]) -> None:
        """``providers`` raises SettingsError for a name that is not configured."""
        self._routes = routes
        self._providers = providers

    def resolve(self, request: Generate) -> tuple[Generate, list[str]]:
        """Return the request with its usable fallbacks, and a note for each route fallback that cannot take it.

        Raises RequestInvalid, naming the place, if one of the request's own fallbacks cannot take it.
        """
        if request.fallback is not None:
            for i in range(len(request.fallback)):
                try:
                    self._check(request, i + 1)
                except TokenbusError as e:
                    raise RequestInvalid(f"fallback[{i}]", f"it cannot take this request: {e}") from None
            return request, []
        route = None if request.on_failure == "fail" else self._route_of(request)
        if route is None:
            return request, []
        own = Fallback(provider=request.provider, model=request.model)
        choices = [Fallback(provider=c.provider, model=self._true_model(c), extra=c.extra) for c in route.fallback]
        routed = msgspec.structs.replace(request, fallback=[c for c in choices if c != own])
        kept: list[Fallback] = []
        notes: list[str] = []
        for i, choice in enumerate(routed.fallback or ()):
            try:
                self._check(routed, i + 1)
            except TokenbusError as e:
                notes.append(f"no fallback to {choice.model} at {choice.provider}, which cannot take this request: {e}")
            else:
                kept.append(choice)
        return msgspec.structs.replace(request, fallback=kept or None), notes

    def _route_of(self, request: Generate) -> FallbackRoute | None:
        return next((route for route in self._routes if on_route(request, route)), None)

    def _true_model(self, choice: FallbackChoice) -> str:
        """Resolve an alias to the name that limits and quirks use, as for a request's own models."""
        try:
            return self._providers(choice.provider).settings.true_model(choice.model)
        except SettingsError:
            return choice.model  # `_check` reports the problem

    def _check(self, request: Generate, choice: int) -> None:
        """Check that this choice can take the request. Raises RequestInvalid or SettingsError if not.

        Builds the request as the choice would get it. Blobs and large media are not loaded: the request states their
        types and sizes.
        """
        candidate = request_for(request, choice)
        provider = self._providers(candidate.provider)
        limits = limits_of(provider.settings.api, provider.settings.media)
        turn = CallInput(candidate, [])
        candidate = turn.without(refused_media(limits, turn, dict(media_of(candidate)))).request
        media = dict(media_of(candidate))
        check_media(limits, media.items())
        stubs: dict[str, Source] = {}
        for where, part in media.items():
            match part.source:
                case FileSource() if candidate.provider != request.provider:
                    problem = f"it is stored with {request.provider}, and {candidate.provider} does not have it"
                    raise RequestInvalid(f"{where}.source", problem)
                case Base64Source(media_type=media_type) | BlobSource(media_type=media_type):
                    stubs[where] = Base64Source(media_type=media_type, data=_STUB)
                case _:
                    pass
        provider.build(request_with(candidate, stubs), [])


class Described(Protocol):
    """The conditions of a settings table; an empty field matches any request."""

    @property
    def providers(self) -> tuple[str, ...]: ...
    @property
    def models(self) -> tuple[str, ...]: ...
    @property
    def metadata(self) -> Mapping[str, str]: ...


class Route(Described, Protocol):
    """The same conditions, and the tenant."""

    @property
    def tenants(self) -> tuple[str, ...]: ...


def meets(request: Generate, described: Described) -> bool:
    """Whether the request matches by provider, model and metadata."""
    metadata = request.metadata or {}
    return (
        (not described.providers or request.provider in described.providers)
        and (not described.models or any(names_model(name, request.model) for name in described.models))
        and all(metadata.get(name) == text for name, text in described.metadata.items())
    )


def on_route(request: Generate, route: Route) -> bool:
    """Whether the request matches, including its tenant."""
    return meets(request, route) and (not route.tenants or tenant_of(request.metadata) in route.tenants)


# The caller cannot choose their format, so they never end a run. An image that this provider does not take, because of
# its type, its size or the number of images, is left out with a note; so is one whose blob is gone. In a tool's result,
# a short text replaces it, so that the model knows.


LEFT_OUT = "[an image is left out here: {}]"


class CallInput(msgspec.Struct, frozen=True):
    request: Generate
    history: list[Message]
    notes: tuple[str, ...] = ()
    """Notes on what was left out."""

    def without(self, reasons: Mapping[str, str]) -> CallInput:
        """Return the turn without the images at these places. ``reasons``: the reason by place."""
        if not reasons:
            return self
        messages = [_without(m, f"messages[{i}]", reasons) for i, m in enumerate(self.request.messages)]
        history = [_without(m, f"history[{i}]", reasons) for i, m in enumerate(self.history)]
        notes = [f"{where}: the image was left out: {reason}" for where, reason in reasons.items()]
        request = msgspec.structs.replace(self.request, messages=messages)
        return CallInput(request, history, (*self.notes, *notes))


def model_and_tool_images(turn: CallInput) -> dict[str, ImagePart]:
    """Return such images by place, in order."""
    found: dict[str, ImagePart] = {}
    for root, messages in (("messages", turn.request.messages), ("history", turn.history)):
        for i, message in enumerate(messages):
            for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
                where = f"{root}[{i}].content[{j}]"
                if isinstance(part, ImagePart) and message.role == "assistant":
                    found[where] = part
                elif isinstance(part, ToolResultPart) and not isinstance(part.content, str):
                    images = ((k, inner) for k, inner in enumerate(part.content) if isinstance(inner, ImagePart))
                    found |= {f"{where}.content[{k}]": inner for k, inner in images}
    return found


def refused_media(limits: MediaLimits, turn: CallInput, media: Mapping[str, Media]) -> dict[str, str]:
    """Return which of them the provider does not take, and why. ``media``: all media of the turn. If there are too
    many images, the oldest are left out.
    """
    images = model_and_tool_images(turn)
    reasons = {where: why for where, image in images.items() if (why := _reason(limits, image))}
    if limits.images is not None:
        shown = sum(isinstance(part, ImagePart) for part in media.values()) - len(reasons)
        left = [where for where in images if where not in reasons]
        for where in left[: max(0, shown - limits.images)]:
            reasons[where] = f"this provider takes {limits.images} images in a request"
    return reasons


def _reason(limits: MediaLimits, image: ImagePart) -> str | None:
    source = image.source
    if not isinstance(source, Base64Source | BlobSource):
        return None
    if not takes_type(source.media_type, limits.image_types):
        return f"this provider takes no image of type {plain_media_type(source.media_type)!r}"
    size = decoded_size(source.data) if isinstance(source, Base64Source) else source.size_bytes or 0
    if limits.image_bytes is not None and size > limits.image_bytes:
        return f"it has {size} bytes, this provider takes at most {limits.image_bytes}"
    return None


def _without(message: Message, where: str, reasons: Mapping[str, str]) -> Message:
    if isinstance(message.content, str) or not any(place.startswith(f"{where}.") for place in reasons):
        return message
    content = [_replaced(part, f"{where}.content[{j}]", reasons) for j, part in enumerate(message.content)]
    return msgspec.structs.replace(message, content=content)


def _replaced(part: ContentPart, where: str, reasons: Mapping[str, str]) -> ContentPart:
    if where in reasons:
        return TextPart(text="")  # empty, so that the places of later parts stay the same
    if not isinstance(part, ToolResultPart) or isinstance(part.content, str):
        return part
    inside = [
        TextPart(text=LEFT_OUT.format(reasons[at])) if (at := f"{where}.content[{k}]") in reasons else inner
        for k, inner in enumerate(part.content)
    ]
    return msgspec.structs.replace(part, content=_only_text(inside))


def _only_text(content: Sequence[TextPart | ImagePart]) -> str | list[TextPart | ImagePart]:
    """Join text-only content into one text, which every API accepts in a result."""
    texts = [part.text for part in content if isinstance(part, TextPart)]
    return "\n".join(texts) if len(texts) == len(content) else list(content)
