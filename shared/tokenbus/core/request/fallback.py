"""Model fallback, as a request's own fields: whom a run may ask, and with which request."""

from __future__ import annotations

import msgspec

from tokenbus.events.requests import Generate


def request_for(request: Generate, choice: int) -> Generate:
    """The request as this choice gets it: 0 is the request's own provider and model, n its n-th fallback.

    What the request has in `extra` is for its own provider: a fallback gets it only if that is the same provider, or
    the `extra` that it has itself.
    """
    if not choice:
        return request
    assert request.fallback
    asked = request.fallback[choice - 1]
    extra = asked.extra
    if extra is None and asked.provider == request.provider:
        extra = request.extra
    return msgspec.structs.replace(request, provider=asked.provider, model=asked.model, extra=extra)


def all_choices(request: Generate) -> list[Generate]:
    """The request as each of its choices gets it, in the order in which they are asked."""
    return [request_for(request, n) for n in range(1 + len(request.fallback or ()))]


def left_from(request: Generate, choice: int) -> Generate:
    """The request of a run that goes on with this choice: the fallbacks before it are no longer asked."""
    if not choice:
        return request
    return msgspec.structs.replace(request_for(request, choice), fallback=(request.fallback or [])[choice:])
