"""Decides, when a run is accepted, which fallbacks it may use if its provider fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from tokenbus.core.request.fallback_request import request_for
from tokenbus.errors import RequestInvalid, SettingsError, TokenbusError
from tokenbus.events.requests import Base64Source, BlobSource, Fallback, FileSource, Generate, Message, Source
from tokenbus.providers.api import Built
from tokenbus_services.intake.settings_match import on_route
from tokenbus_services.intake.unasked_media import CallInput, refused_media
from tokenbus_services.media.locate import media_of, request_with
from tokenbus_services.media.provider_limits import check_media, limits_of
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
