"""The paths that are forwarded, one row each. Pure.

A row says which API has the path, which field names the model, whether the provider bills it, and whose the things are
that it makes. Everything else is the same for all of them. To forward another path, add a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from tokenbus.providers.api import ApiName
from tokenbus_services.gateway.problem import Problem, Refusal
from tokenbus_services.settings.tables.gateway import ForwardKind

Family = Literal["openai", "anthropic", "gemini"]
Body = Literal["none", "json", "requests", "form", "file"]
"""``json``: the field `model` names the model, unless the path does. ``requests``: each of the field `requests` has its
own. ``form``: the field `model` of a form, or of JSON. ``file``: a form that names none.
"""

FAMILIES: Mapping[Family, tuple[ApiName, ...]] = {
    "openai": ("openai-chat", "openai-responses", "openai-images", "openai-completions"),
    "anthropic": ("anthropic",),
    "gemini": ("gemini", "gemini-interactions"),
}
"""The APIs of providers that have a family's paths."""
BASES: Mapping[Family, tuple[str, ...]] = {
    "openai": ("/v1", ""),
    "anthropic": ("/anthropic/v1", "/anthropic/v1/v1", "/v1", "/v1/v1"),
    "gemini": ("/gemini/v1beta", "/gemini/v1", "/v1beta"),
}
"""Where clients find them."""
RESPONSES = ("openai-responses",)


class ForwardedPath(msgspec.Struct, frozen=True, kw_only=True):
    """One path of a family of APIs."""

    kind: ForwardKind
    family: Family
    method: Literal["GET", "POST", "DELETE"]
    path: str
    """Below the base URL of OpenAI and Gemini, and below `/v1` of Anthropic. `{model}` and `{id}` are filled in."""
    what: str
    """What it does."""
    body: Body = "none"
    needs_model: bool = True
    apis: tuple[ApiName, ...] = ()
    """The APIs of providers that have it; empty: all of the family."""
    seen: bool = True
    """See `ForwardedCall.seen`."""
    makes: tuple[str, ...] = ()
    """Fields of the answer with ids of things that are its caller's from then on."""
    takes: tuple[str, ...] = ()
    """Fields of the request with ids of things that must be its caller's."""
    lists_all: bool = False
    """Whether the answer has things of everybody who uses the account."""
    ours: tuple[str, ...] = ()
    """Fields that are refused, as they name a conversation that is stored: at the gateway, whose responses the provider
    does not know, or in the provider's account, which all tenants share.
    """
    is_metered: bool = False
    """Whether the provider bills it by tokens."""
    has_output: bool = False
    """Whether the model writes something that is billed."""

    @property
    def providers(self) -> tuple[ApiName, ...]:
        return self.apis or FAMILIES[self.family]

    @property
    def names_model(self) -> bool:
        """Whether the request, or its path, may name a model."""
        return "{model}" in self.path or self.body in ("json", "requests", "form")

    def off(self, path: str) -> Refusal:
        """The answer of a gateway that does not forward it."""
        why = (
            f"{self.method} {path[:200]} {self.what}. It is no run, so a gateway forwards it only if its setting "
            f'gateway.forward has "{self.kind}", and this one has not'
        )
        return Refusal(Problem(status=404, code="not_forwarded", message=why, kind="not_found"))

    def not_allowed(self) -> Refusal:
        """The answer to a key that is not for it."""
        why = f"this key may not use {self.kind}: `forward` of the key lists what it may forward"
        return Refusal(Problem(status=403, code="forward_not_allowed", message=why, kind="auth"))

    def wrong_api(self, provider: str, api: ApiName) -> Refusal:
        why = f"the provider {provider!r} speaks {api}, which has no {self.path}; those with it speak "
        why += ", ".join(self.providers)
        return Refusal(
            Problem(status=400, code="unsupported_provider", message=why, kind="invalid_request", param="model")
        )


def _post(kind: ForwardKind, path: str, what: str, body: Body = "json", **more: Any) -> ForwardedPath:
    return ForwardedPath(kind=kind, family="openai", method="POST", path=path, what=what, body=body, **more)


def _of_things(kind: ForwardKind, family: Family, path: str, what: str) -> tuple[ForwardedPath, ...]:
    def row(method: Literal["GET", "POST", "DELETE"], end: str, does: str, **more: Any) -> ForwardedPath:
        return ForwardedPath(kind=kind, family=family, method=method, path=path + end, what=does, **more)

    makes = () if kind == "files" else _BATCH if family == "openai" else ("id",)
    rows = [row("GET", "", f"lists every {what} of the account", lists_all=True)]
    rows.append(row("GET", "/{id}", f"describes a {what}", makes=makes))
    if (kind, family) != ("batches", "openai"):
        rows.append(row("DELETE", "/{id}", f"deletes a {what}"))
    if kind == "files":
        rows.append(row("GET", "/{id}/content", "downloads a file"))
    else:
        rows.append(row("POST", "/{id}/cancel", "cancels a batch", makes=makes))
    if (kind, family) == ("batches", "anthropic"):
        rows.append(row("GET", "/{id}/results", "downloads the answers of a batch"))
    return tuple(rows)


_BATCH = ("id", "output_file_id", "error_file_id")
_STORED = ("previous_response_id", "conversation", "prompt")
_WRITES: dict[str, Any] = {"is_metered": True, "has_output": True}

TABLE: tuple[ForwardedPath, ...] = (
    _post("embeddings", "/embeddings", "makes embeddings", is_metered=True),
    ForwardedPath(
        kind="embeddings",
        family="gemini",
        method="POST",
        path="/models/{model}:embedContent",
        what="makes an embedding",
        body="json",
        is_metered=True,
    ),
    ForwardedPath(
        kind="embeddings",
        family="gemini",
        method="POST",
        path="/models/{model}:batchEmbedContents",
        what="makes embeddings",
        body="json",
        is_metered=True,
    ),
    _post("moderations", "/moderations", "classifies content", needs_model=False),
    _post("compact", "/responses/compact", "shortens a conversation", apis=RESPONSES, ours=_STORED, **_WRITES),
    _post("audio", "/audio/speech", "speaks a text", **_WRITES),
    _post("audio", "/audio/transcriptions", "writes down speech", "form", **_WRITES),
    _post("audio", "/audio/translations", "writes down speech in English", "form", **_WRITES),
    _post("images", "/images/edits", "edits images", "form", **_WRITES),
    _post("images", "/images/variations", "varies an image", "form", needs_model=False, **_WRITES),
    _post("token_counts", "/responses/input_tokens", "counts tokens", apis=RESPONSES, ours=_STORED),
    ForwardedPath(
        kind="token_counts",
        family="anthropic",
        method="POST",
        path="/messages/count_tokens",
        what="counts tokens",
        body="json",
    ),
    ForwardedPath(
        kind="token_counts",
        family="gemini",
        method="POST",
        path="/models/{model}:countTokens",
        what="counts tokens",
        body="json",
    ),
    ForwardedPath(
        kind="files",
        family="anthropic",
        method="POST",
        path="/files",
        what="uploads a file",
        body="file",
        makes=("id",),
    ),
    *_of_things("files", "anthropic", "/files", "file"),
    _post("files", "/files", "uploads a file", "file", makes=("id",)),
    *_of_things("files", "openai", "/files", "file"),
    _post(
        "batches",
        "/batches",
        "has the requests of a file answered later",
        needs_model=False,
        seen=False,
        takes=("input_file_id",),
        makes=_BATCH,
    ),
    *_of_things("batches", "openai", "/batches", "batch"),
    ForwardedPath(
        kind="batches",
        family="anthropic",
        method="POST",
        path="/messages/batches",
        what="has requests answered later",
        body="requests",
        seen=False,
        makes=("id",),
    ),
    *_of_things("batches", "anthropic", "/messages/batches", "batch"),
    ForwardedPath(
        kind="models",
        family="openai",
        method="GET",
        path="/models",
        what="lists the models of the provider that a header names",
        apis=tuple(api for apis in FAMILIES.values() for api in apis),
    ),
)
"""All of them. Of two with one path, the header of an API selects the first."""
NOT_THERE = (404, 405, 501)
"""Statuses of a provider that has no such path."""
