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
Method = Literal["GET", "POST", "PATCH", "DELETE"]
Body = Literal["none", "json", "requests", "form", "file", "content"]
"""``json``: the field `model` names the model, unless the path does. ``requests``: each of the field `requests` has its
own. ``form``: the field `model` of a form, or of JSON. ``file``: a form that names none. ``content``: bytes of a file,
for the URL that the answer to the beginning of its upload has.
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
PROVIDER = "x-tokenbus-provider"
"""Header that names the provider of a request without a model."""


class ForwardedPath(msgspec.Struct, frozen=True, kw_only=True):
    """One path of a family of APIs."""

    kind: ForwardKind
    family: Family
    method: Method
    path: str
    """Below the base URL of OpenAI and Gemini, and below `/v1` of Anthropic. What is in braces is filled in: `{id}` is
    of a thing that must be the caller's, and other ids are of what is in it.
    """
    what: str
    """What it does."""
    header: str = ""
    """A header (in lower case) of the requests for this row, if others have its path."""
    is_upload: bool = False
    """Whether `/upload` stands before the version, in front of the path."""
    begins_upload: bool = False
    """Whether the answer has the URL of an upload in a header. See `Forwarder`."""
    body: Body = "none"
    needs_model: bool = True
    apis: tuple[ApiName, ...] = ()
    """The APIs of providers that have it; empty: all of the family."""
    seen: bool = True
    """See `ForwardedCall.seen`."""
    makes: tuple[str, ...] = ()
    """Fields of the answer with ids of things that are its caller's from then on. See `JsonBody.texts`."""
    takes: tuple[str, ...] = ()
    """Fields of the request with ids of things that must be its caller's. See `JsonBody.texts`."""
    changes: bool = False
    """Whether it changes a thing that is there; deletes, cancels and patches do in any case."""
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

    @property
    def action(self) -> str | None:
        """What the audit calls it; None for what changes nothing that is in the provider's account."""
        if self.method == "DELETE":
            return f"{self.kind}.delete"
        if self.path.endswith(("/cancel", ":cancel")):
            return f"{self.kind}.cancel"
        return f"{self.kind}.change" if self.changes or self.method == "PATCH" else None

    def below(self, base: str) -> str:
        """Its path for a client or a provider with this base URL, or its path."""
        before, _, version = base.rpartition("/")
        return f"{before}/upload/{version}{self.path}" if self.is_upload else base + self.path

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


def _row(kind: ForwardKind, family: Family, method: Method, path: str, what: str, **more: Any) -> ForwardedPath:
    return ForwardedPath(kind=kind, family=family, method=method, path=path, what=what, **more)


def _post(kind: ForwardKind, path: str, what: str, body: Body = "json", **more: Any) -> ForwardedPath:
    return _row(kind, "openai", "POST", path, what, body=body, **more)


def _of_model(kind: ForwardKind, method: str, what: str, **more: Any) -> ForwardedPath:
    return _row(kind, "gemini", "POST", f"/models/{{model}}:{method}", what, body="json", **more)


def _of_things(
    kind: ForwardKind,
    family: Family,
    path: str,
    what: str,
    *others: tuple[Method, str, str],
    deletes: bool = True,
    **more: Any,
) -> tuple[ForwardedPath, ...]:
    """What can be done with all things that have been made. ``others``: method, end of the path, what it does."""
    rows = [_row(kind, family, method, f"{path}/{{id}}{end}", does, **more) for method, end, does in others]
    rows.append(_row(kind, family, "GET", path, f"lists every {what} of the account", **{**more, "lists_all": True}))
    rows.append(_row(kind, family, "GET", path + "/{id}", f"describes a {what}", **more))
    if deletes:
        rows.append(_row(kind, family, "DELETE", path + "/{id}", f"deletes a {what}", **more))
    return tuple(rows)


_BATCH: dict[str, Any] = {"makes": ("id", "output_file_id", "error_file_id")}
_GEMINI_BATCH: dict[str, Any] = {"makes": ("name", "metadata.output.responses_file", "response.responses_file")}
_STORED = ("previous_response_id", "conversation", "prompt")
_WRITES: dict[str, Any] = {"is_metered": True, "has_output": True}
_FIELDS: dict[str, Any] = {"body": "json", "needs_model": False}
_LATER: dict[str, Any] = {"seen": False, "takes": ("batch.input_config.file_name",), **_GEMINI_BATCH}
_CANCEL: tuple[Method, str, str] = ("POST", "/cancel", "cancels a batch")
_STORE = "/vector_stores/{id}"
_IN_STORE: dict[str, Any] = {"needs_model": False, "takes": ("file_id", "file_ids", "files.file_id")}

TABLE: tuple[ForwardedPath, ...] = (
    _post("embeddings", "/embeddings", "makes embeddings", is_metered=True),
    _of_model("embeddings", "embedContent", "makes an embedding", is_metered=True),
    _of_model("embeddings", "batchEmbedContents", "makes embeddings", is_metered=True),
    _post("moderations", "/moderations", "classifies content", needs_model=False),
    _post("compact", "/responses/compact", "shortens a conversation", apis=RESPONSES, ours=_STORED, **_WRITES),
    _post("audio", "/audio/speech", "speaks a text", **_WRITES),
    _post("audio", "/audio/transcriptions", "writes down speech", "form", **_WRITES),
    _post("audio", "/audio/translations", "writes down speech in English", "form", **_WRITES),
    _post("images", "/images/edits", "edits images", "form", **_WRITES),
    _post("images", "/images/variations", "varies an image", "form", needs_model=False, **_WRITES),
    _post("token_counts", "/responses/input_tokens", "counts tokens", apis=RESPONSES, ours=_STORED),
    _row("token_counts", "anthropic", "POST", "/messages/count_tokens", "counts tokens", body="json"),
    _of_model("token_counts", "countTokens", "counts tokens"),
    # files
    _row(
        "files", "anthropic", "POST", "/files", "uploads a file", body="file", makes=("id",), header="anthropic-version"
    ),
    *_of_things(
        "files", "anthropic", "/files", "file", ("GET", "/content", "downloads a file"), header="anthropic-version"
    ),
    _post("files", "/files", "uploads a file", "file", makes=("id",)),
    *_of_things("files", "openai", "/files", "file", ("GET", "/content", "downloads a file")),
    _post("files", "/uploads", "begins to upload a file", needs_model=False, makes=("id",)),
    _post("files", "/uploads/{id}/parts", "uploads a part of a file", "file"),
    _post("files", "/uploads/{id}/complete", "ends an upload", needs_model=False, makes=("id", "file.id")),
    _post("files", "/uploads/{id}/cancel", "gives up an upload", "none"),
    _row(
        "files",
        "gemini",
        "POST",
        "/files",
        "uploads the content of a file",
        body="content",
        is_upload=True,
        header="x-goog-upload-offset",
        makes=("file.name",),
    ),
    _row(
        "files",
        "gemini",
        "POST",
        "/files",
        "begins to upload a file",
        is_upload=True,
        begins_upload=True,
        **_FIELDS,
    ),
    *_of_things("files", "gemini", "/files", "file", ("GET", ":download", "downloads a file")),
    # batches
    _post(
        "batches",
        "/batches",
        "has the requests of a file answered later",
        needs_model=False,
        seen=False,
        takes=("input_file_id",),
        **_BATCH,
    ),
    *_of_things("batches", "openai", "/batches", "batch", _CANCEL, deletes=False, **_BATCH),
    _row(
        "batches",
        "anthropic",
        "POST",
        "/messages/batches",
        "has requests answered later",
        body="requests",
        seen=False,
        makes=("id",),
    ),
    _row("batches", "anthropic", "GET", "/messages/batches/{id}/results", "downloads the answers of a batch"),
    *_of_things("batches", "anthropic", "/messages/batches", "batch", _CANCEL, makes=("id",)),
    _of_model("batches", "batchGenerateContent", "has requests answered later", **_LATER),
    _of_model("batches", "asyncBatchEmbedContent", "has embeddings made later", **_LATER),
    *_of_things("batches", "gemini", "/batches", "batch", ("POST", ":cancel", "cancels a batch"), **_GEMINI_BATCH),
    # stores
    _row(
        "caches",
        "gemini",
        "POST",
        "/cachedContents",
        "stores content for later requests",
        body="json",
        seen=False,
        makes=("name",),
    ),
    _row("caches", "gemini", "PATCH", "/cachedContents/{id}", "changes how long content is stored", **_FIELDS),
    *_of_things("caches", "gemini", "/cachedContents", "stored content"),
    _post("vector_stores", "/vector_stores", "makes a vector store", seen=False, makes=("id",), **_IN_STORE),
    _post("vector_stores", _STORE, "changes a vector store", needs_model=False, changes=True),
    _post("vector_stores", _STORE + "/search", "searches a vector store", needs_model=False, seen=False),
    *_of_things("vector_stores", "openai", "/vector_stores", "vector store", ("GET", "/files", "lists files in it")),
    _post("vector_stores", _STORE + "/files", "adds a file to a vector store", changes=True, **_IN_STORE),
    _row("vector_stores", "openai", "GET", _STORE + "/files/{file}", "describes a file in a vector store"),
    _post(
        "vector_stores", _STORE + "/files/{file}", "changes a file's attributes there", needs_model=False, changes=True
    ),
    _row("vector_stores", "openai", "DELETE", _STORE + "/files/{file}", "takes a file out of a vector store"),
    _row("vector_stores", "openai", "GET", _STORE + "/files/{file}/content", "shows what is stored of a file"),
    _post("vector_stores", _STORE + "/file_batches", "adds files to a vector store", changes=True, **_IN_STORE),
    _row("vector_stores", "openai", "GET", _STORE + "/file_batches/{batch}", "describes files that are added"),
    _post("vector_stores", _STORE + "/file_batches/{batch}/cancel", "stops adding files", "none"),
    _row("vector_stores", "openai", "GET", _STORE + "/file_batches/{batch}/files", "lists files that are added"),
    _row(
        "models",
        "openai",
        "GET",
        "/models",
        "lists the models of the provider that a header names",
        apis=tuple(api for apis in FAMILIES.values() for api in apis),
        header=PROVIDER,
    ),
)
"""All of them. Of two with one path, the header of an API selects the first."""
NOT_THERE = (404, 405, 501)
"""Statuses of a provider that has no such path."""
