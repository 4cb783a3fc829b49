"""What clients put on the inbound stream: generate and cancel, and the messages inside."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Name = Annotated[str, Meta(min_length=1, max_length=256)]
RunId = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._:@~+=-]+$(?!\n)")]
"""Safe in a key and in a shell; a UUIDv7 where the client gives none."""
OnFailure = Literal["before_first_visible", "continue", "restart", "fail"]
Mode = Literal["chat", "prefill"]
Effort = Literal["minimal", "low", "medium", "high"]


class _Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """Base of content parts."""


class Base64Source(_Part, frozen=True, kw_only=True, tag="base64"):
    """Media inside the request."""

    media_type: str
    data: str


class UrlSource(_Part, frozen=True, kw_only=True, tag="url"):
    """Media that the provider fetches."""

    url: str


class BlobSource(_Part, frozen=True, kw_only=True, tag="blob"):
    """Media in the blob store, loaded when the provider request is built."""

    blob_id: str
    media_type: str
    size_bytes: int | None = None


class FileSource(_Part, frozen=True, kw_only=True, tag="file"):
    """Media that lie with the provider already, in its own file store."""

    file_id: str
    """As its file API gave it; of Gemini's the `uri`."""
    media_type: str | None = None
    """For Gemini, which wants it told."""


Source = Base64Source | UrlSource | BlobSource | FileSource


class TextPart(_Part, frozen=True, kw_only=True, tag="text"):
    """Text; ``cache`` asks the provider to keep the prompt up to here, where it can.

    ``opaque`` of this and other parts is what a provider wants back with them, as `block_complete` told it; its ``api``
    and ``provider`` say whose it is, and no other gets it. ``opaque_blobs`` names blobs that hold further values.
    """

    text: str
    cache: bool = False
    opaque: dict[str, str] | None = None
    opaque_blobs: dict[str, str] | None = None


class ThinkingPart(_Part, frozen=True, kw_only=True, tag="thinking"):
    """The model's own thinking from an earlier turn, with the data that its provider wants back."""

    text: str = ""
    signature: str | None = None
    opaque: dict[str, str] | None = None
    opaque_blobs: dict[str, str] | None = None


class ImagePart(_Part, frozen=True, kw_only=True, tag="image"):
    """An image; in an assistant's message one that the model made, with the data that its provider wants back."""

    source: Source
    cache: bool = False
    opaque: dict[str, str] | None = None
    opaque_blobs: dict[str, str] | None = None


class DocumentPart(_Part, frozen=True, kw_only=True, tag="document"):
    source: Source
    title: str | None = None
    cache: bool = False


class ToolCallPart(_Part, frozen=True, kw_only=True, tag="tool_call"):
    """A call that the model made; ``arguments`` is the raw string as it came."""

    tool_id: str
    tool_name: str
    arguments: str
    opaque: dict[str, str] | None = None
    opaque_blobs: dict[str, str] | None = None


class ToolResultPart(_Part, frozen=True, kw_only=True, tag="tool_result"):
    """What a tool gave back for the call ``tool_id``."""

    tool_id: str
    content: str | list[TextPart | ImagePart]
    tool_name: str | None = None
    is_error: bool = False
    cache: bool = False


class ExtraPart(_Part, frozen=True, kw_only=True, tag="extra"):
    """A provider's own content item (a server-run tool, say), sent back to it as it came."""

    name: str
    json: str


ContentPart = TextPart | ThinkingPart | ImagePart | DocumentPart | ToolCallPart | ToolResultPart | ExtraPart


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[ContentPart]
    participant: str | None = None


class Tool(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tool that the model may call. ``parameters`` is a JSON schema of type object."""

    name: Name
    description: str | None = None
    parameters: dict[str, object] = {}


class Thinking(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How much the model may think; a provider takes what it knows of these."""

    enabled: bool = True
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None
    effort: Effort | None = None


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which tool the model must call, by name."""

    name: Name


class OutputSchema(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer must be JSON that meets ``schema``. Each provider takes some of JSON Schema, and refuses the rest."""

    schema: dict[str, object]
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$(?!\n)")] = "answer"
    """What the model reads as the name of the format, where its API has one."""
    strict: bool | None = None
    """Whether the API is to enforce the schema to the letter; None: as it does by itself. Some always do."""


class PrefillOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a conversation is written as one text (mode prefill); see docs/guides/prefill.md, "Writing"."""

    delimiter: Annotated[str, Meta(max_length=64)] | None = None
    """Between two messages. None: a line end, or nothing where a token ends each message."""
    end_of_turn: Annotated[str, Meta(max_length=64)] | None = None
    """The token after each message, which ends the model's turn too; empty: none; None: as the provider has it."""
    stop_on_end_of_turn: bool = True
    """Whether the provider is told to stop on the token; if not, tokenbus still does."""
    first_user_message: str | None = None
    """What the user says before the text, where the API wants a user's message there; None: a few words of tokenbus."""
    names_once: bool = False
    """Leave the name out where the message before it was the same participant's."""
    unnamed: list[str] = []
    """Participants whose names are always left out; for a rule that is not a list see `tokenbus.prefill_names`."""


ImageWord = Annotated[str, Meta(pattern=r"^[A-Za-z0-9:._-]{1,64}$(?!\n)")]


class ImageOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Asks for images in the answer. See docs/guides/images.md. Values use the provider's own words; an option
    that a provider does not have is refused by name, never left out."""

    size: ImageWord | None = None
    """`1024x1024` (OpenAI), `2K` (Gemini)."""
    aspect_ratio: ImageWord | None = None
    """`16:9` (Gemini)."""
    quality: ImageWord | None = None
    format: Literal["png", "jpeg", "webp"] | None = None
    background: Literal["transparent", "opaque", "auto"] | None = None
    model: Name | None = None
    """The image model, where the request's own model only calls it (the Responses API's tool)."""
    count: Annotated[int, Meta(ge=1, le=10)] = 1
    previews: Annotated[int, Meta(ge=0, le=3)] = 0
    """How many previews of each image at the most."""
    mask: ImagePart | None = None
    """Where the (first) image of the request may change: a PNG of its size, transparent there (OpenAI)."""
    deliver: Literal["blob", "base64"] = "blob"
    """Whether events carry the images' blob ids, or their bytes."""


class Fallback(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A provider and a model to ask when those before it failed."""

    provider: Name
    model: Name
    extra: dict[str, object] | None = None
    """In place of the request's `extra`, which goes to the request's own provider alone."""


class Generate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="generate", tag_field="type"):
    """One generation request. A repeated ``id`` is the same run."""

    provider: Name
    """The NAME of a configured provider; keys never travel."""
    model: Name
    messages: Annotated[list[Message], Meta(min_length=1)]
    id: RunId | None = None
    mode: Mode = "chat"
    system: str | list[TextPart] | None = None
    tools: list[Tool] = []
    tool_choice: Literal["auto", "none", "any"] | ToolChoice | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    stop: list[Annotated[str, Meta(min_length=1)]] = []
    thinking: Thinking | None = None
    output_schema: OutputSchema | None = None
    stream: bool = True
    max_tool_depth: Annotated[int, Meta(ge=0, le=1000)] = 10
    """The most tool turns of the run; 0: calls are reported and never run."""
    tool_timeout_s: Annotated[float, Meta(gt=0)] | None = None
    on_failure: OnFailure = "before_first_visible"
    deadline_s: Annotated[float, Meta(gt=0)] | None = None
    """Seconds from acceptance until the run fails with class timeout."""
    participant: str | None = None
    metadata: dict[str, object] | None = None
    """The caller's own; handed back in `started`, never sent to the provider."""
    extra: dict[str, object] | None = None
    """Merged into the provider's request body as it is, for what has no name here."""
    prefill: PrefillOptions | None = None
    """Mode prefill alone."""
    convert_unsigned_thinking_to_text: bool = False
    """Thinking in `messages` that the provider cannot take back (it has no signature, or another provider's) becomes
    `<thinking>` text; otherwise it is left out, with a note."""
    names_in_text: bool = False
    """Mode chat: names of participants go into the texts (`Ann: …`). Otherwise they go into the field that Chat
    Completions has for them; other APIs have none, and they are left out, with a note."""
    images: ImageOptions | None = None
    """Mode chat alone: the model is to make images."""
    record: bool | None = None
    """Whether request, raw stream and result are kept for `tokenbus replay`; None: as the deployment's settings say."""
    visible: bool = True
    """False: no text of this run is visible. For what services ask a model and nobody should hear."""
    policies: list[Name] = []
    """Configured policies that judge this run, after those that its route has anyway."""
    fallback: Annotated[list[Fallback], Meta(max_length=8)] | None = None
    """Whom to ask, one after the other, when a turn fails before anything visible of it was emitted. None: as the
    deployment's settings say; an empty list: nobody."""


class Cancel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="cancel", tag_field="type"):
    """Stop a run, at the provider's socket too."""

    run: RunId
    reason: Annotated[str, Meta(max_length=1024)] | None = None
    heard_through: Annotated[int, Meta(ge=-1)] | None = None
    """The last ``seq`` that the listener heard."""


Request = Generate | Cancel
