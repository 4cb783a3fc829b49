"""Whether a provider and model can continue a partial answer (`on_failure` continue, `Client.resume`)."""

from __future__ import annotations

from tokenbus.events.quirks import ApiName, Quirks
from tokenbus.events.requests import Generate
from tokenbus.providers import registry


def continues(request: Generate, api: ApiName, quirks: Quirks) -> bool:
    """Whether provider and model can continue a partial answer to this request.

    A text that the model continues anyway (prefill mode) can be continued once more; in chat mode the API knows.
    ``quirks`` are those of the model.
    """
    return request.mode == "prefill" or registry.get(api).continues(request, quirks)
