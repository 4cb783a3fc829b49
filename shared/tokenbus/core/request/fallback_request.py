"""Model fallback of a request: its choices of provider and model, and the request for each."""

from __future__ import annotations

import msgspec

from tokenbus.events.requests import Generate


def request_for(request: Generate, choice: int) -> Generate:
    """The request for this choice: 0 is the request's own provider and model, n its n-th fallback.

    The request's `extra` is for its own provider: a fallback uses it only with the same provider, unless the fallback
    has its own `extra`.
    """
    if not choice:
        return request
    assert request.fallback
    fallback = request.fallback[choice - 1]
    extra = fallback.extra
    if extra is None and fallback.provider == request.provider:
        extra = request.extra
    return msgspec.structs.replace(request, provider=fallback.provider, model=fallback.model, extra=extra)


def all_choices(request: Generate) -> list[Generate]:
    """The request for each choice, in the order in which they are tried."""
    return [request_for(request, n) for n in range(1 + len(request.fallback or ()))]


def left_from(request: Generate, choice: int) -> Generate:
    """The request of a run that continues with this choice, without the earlier fallbacks."""
    if not choice:
        return request
    return msgspec.structs.replace(request_for(request, choice), fallback=(request.fallback or [])[choice:])
