"""Messages that clients put on the inbound stream: generate, cancel and append."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tokenbus.events.waits import MAX_TIMEOUT_S, ApprovalRule, Door, WaitId

Name = Annotated[str, Meta(min_length=1, max_length=256)]
MAX_RUN_ID_CHARS = 128
RunId = Annotated[str, Meta(min_length=1, max_length=MAX_RUN_ID_CHARS, pattern=r"^[A-Za-z0-9._:@~+=-]+$(?!\n)")]
"""Safe in a key and in a shell; a UUIDv7 if the client gives none."""
TRACEPARENT_PATTERN = r"^[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})$(?!\n)"
"""Version, trace id, span id of the parent, flags."""
OnFailure = Literal["before_first_visible", "before_first_output", "continue", "restart", "fail"]
DurabilityLevel = Literal["server", "replicated"]
"""``server``: what matters counts once the server has it. ``replicated``: once replicas or the disk have it, too."""
Mode = Literal["chat", "prefill"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Penalty = Annotated[float, Meta(ge=-2, le=2)]


class _Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """Base of content parts."""


Cache = bool | Literal["5m", "1h"]
"""Whether the provider should cache the prompt up to here, if it can; a text also says for how long."""
Extra = dict[str, dict[str, object]]
"""Further fields of one object, by the name of the API that has them (`anthropic`): merged into what that API gets for
the object, unchanged. Other APIs do not get them.
"""


class Base64Source(_Part, frozen=True, kw_only=True, tag="base64"):
    """Media inside the request."""

    media_type: str
    data: str


class UrlSource(_Part, frozen=True, kw_only=True, tag="url"):
    """Media that the provider fetches."""

    url: str
    media_type: str | None = None
    """For APIs that want to know it (Gemini). None: as the end of the URL shows it, else it is not sent."""


class BlobSource(_Part, frozen=True, kw_only=True, tag="blob"):
    """Media in the blob store, loaded when the provider request is built."""

    blob_id: str
    media_type: str
    size_bytes: int | None = None


class FileSource(_Part, frozen=True, kw_only=True, tag="file"):
    """Media already stored with the provider's file API."""

    file_id: str
    """The id returned by the file API; for Gemini, the `uri`."""
    media_type: str | None = None
    """Required by Gemini."""


Source = Base64Source | UrlSource | BlobSource | FileSource


class TextPart(_Part, frozen=True, kw_only=True, tag="text"):
    """Text.

    ``cache``, here and in other parts, asks the provider to cache the prompt up to here, if it can. ``extra`` has
    further fields of the part, by API.

    ``opaque``, here and in other parts, is data to send back to the provider, copied from `block_complete`. Its ``api``
    and ``provider`` name the origin; no other provider gets it. ``opaque_blobs`` names blobs with further values.
    """

    text: str
    cache: Cache = False
    opaque: dict[str, str] | None = None
    opaque_blobs: dict[str, str] | None = None
    extra: Extra | None = None


class ThinkingPart(_Part, frozen=True, kw_only=True, tag="thinking"):
    """The model's own thinking from an earlier turn, with the data that its provider wants back."""

    text: str = ""
    signature: str | None = None
    opaque: dict[str, str] | None = None
    opaque_blobs: dict[str, str] | None = None


class ImagePart(_Part, frozen=True, kw_only=True, tag="image"):
    """An image. In an assistant message, one that the model generated, with the data that its provider wants back."""

    source: Source
    cache: Cache = False
    opaque: dict[str, str] | None = None
    opaque_blobs: dict[str, str] | None = None
    detail: Literal["low", "high", "auto"] | None = None
    """How closely the model looks (OpenAI's APIs); None: the API's default. Others take no such option."""
    extra: Extra | None = None


class DocumentPart(_Part, frozen=True, kw_only=True, tag="document"):
    """A document, such as a PDF. ``title`` names it for the model."""

    source: Source
    title: str | None = None
    cache: Cache = False
    citations: bool | None = None
    """Whether the answer cites it (Anthropic). None: the API's default."""
    context: str | None = None
    """What the model should know about the document, and does not cite (Anthropic)."""
    extra: Extra | None = None


class ToolCallPart(_Part, frozen=True, kw_only=True, tag="tool_call"):
    """A call made by the model; ``arguments`` is the raw string, unchanged."""

    tool_id: str
    tool_name: str
    arguments: str
    free_text: bool = False
    """``arguments`` is the free text for a tool with a `format`. An API without such tools gets it as the JSON object
    ``{"input": …}``.
    """
    opaque: dict[str, str] | None = None
    opaque_blobs: dict[str, str] | None = None
    extra: Extra | None = None


class ToolResultPart(_Part, frozen=True, kw_only=True, tag="tool_result"):
    """The result of the tool call ``tool_id``."""

    tool_id: str
    content: str | list[TextPart | ImagePart]
    tool_name: str | None = None
    is_error: bool = False
    cache: Cache = False
    extra: Extra | None = None


class ExtraPart(_Part, frozen=True, kw_only=True, tag="extra"):
    """A provider-specific content item (a server-side tool, say), sent back unchanged."""

    name: str
    json: str


ContentPart = TextPart | ThinkingPart | ImagePart | DocumentPart | ToolCallPart | ToolResultPart | ExtraPart


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message of a conversation. ``participant`` names its speaker; see docs/guides/prefill.md."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[ContentPart]
    participant: str | None = None
    id: Name | None = None
    """The caller's own name of the message. Kept in a session's history, and never sent to a provider."""
    extra: Extra | None = None
    """Further fields of the message, by API. Messages that the API gets as one have the fields of all."""


class TextFormat(_Part, frozen=True, kw_only=True, tag="text", forbid_unknown_fields=True):
    """A tool's input is any text."""


class GrammarFormat(_Part, frozen=True, kw_only=True, tag="grammar", forbid_unknown_fields=True):
    """A tool's input is text of a grammar, which the provider enforces."""

    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Meta(min_length=1)]


InputFormat = TextFormat | GrammarFormat


class Tool(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tool that the model may call. ``parameters`` is a JSON schema of type object."""

    name: Name
    description: str | None = None
    parameters: dict[str, object] = {}
    format: InputFormat | None = None
    """Set for a tool whose input is free text instead of a JSON object (OpenAI's custom tools). Mode chat only."""
    strict: bool | None = None
    """Whether the API should enforce the schema on the model's arguments; None: not, if the API has a choice."""
    extra: Extra | None = None
    """Further fields of the tool, by API: `cache_control`, `defer_loading`."""
    approval: ApprovalRule | None = None
    """Which calls wait for a decision, in addition to those that the deployment's settings name."""
    kind: Literal["client"] | None = None
    """``client``: a client of the run gives the results. None: as the deployment declares the tool."""
    result: dict[str, object] | None = None
    """Of a client's tool: JSON Schema of its result; None: any text."""
    timeout_s: Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)] | None = None
    """Of a client's tool: how long a call waits for its result."""


class Thinking(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How much the model may think. Each provider uses the options it supports."""

    enabled: bool = True
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None
    effort: Effort | None = None
    """``none`` is the same as ``enabled`` false. An API without a level gets its nearest one, with a note."""
    display: Literal["summarized", "omitted"] | None = None
    """Whether the thinking can be read; None: the API's default, which for newer Claude models is ``omitted``."""

    @property
    def wanted(self) -> bool:
        """Whether the model thinks at all."""
        return self.enabled and self.effort != "none"


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The name of the tool that the model must call."""

    name: Name


class OutputSchema(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer must be JSON matching ``schema``. Each provider supports a subset of JSON Schema and rejects the
    rest.
    """

    schema: dict[str, object]
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$(?!\n)")] = "answer"
    """The name of the format, shown to the model if the API supports it."""
    strict: bool | None = None
    """Whether the API should enforce the schema strictly; None: the API's default. Some always do."""


class PrefillOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a conversation is written as one text (mode prefill); see docs/guides/prefill.md, "Writing"."""

    delimiter: Annotated[str, Meta(max_length=64)] | None = None
    """Text between two messages. None: a line end, or nothing if a token ends each message."""
    end_of_turn: Annotated[str, Meta(max_length=64)] | None = None
    """The token after each message, which also ends the model's turn; empty: none; None: the provider's default."""
    stop_on_end_of_turn: bool = True
    """Whether the provider gets the token as a stop string. tokenbus stops on it either way."""
    first_user_message: str | None = None
    """The user message before the text, for APIs that require one; None: a default sentence."""
    names_once: bool = False
    """Omit the name if the previous message had the same participant."""
    unnamed: list[str] = []
    """Participants whose names are always omitted; for a rule that is not a list, see `tokenbus.prefill_names`."""


ImageWord = Annotated[str, Meta(pattern=r"^[A-Za-z0-9:._-]{1,64}$(?!\n)")]


class ImageOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Requests images in the answer. See docs/guides/images.md.

    Values are in the provider's terms. An option that a provider does not have is rejected by name, never ignored.
    """

    size: ImageWord | None = None
    """`1024x1024` (OpenAI), `2K` (Gemini)."""
    aspect_ratio: ImageWord | None = None
    """`16:9` (Gemini)."""
    quality: ImageWord | None = None
    format: Literal["png", "jpeg", "webp"] | None = None
    background: Literal["transparent", "opaque", "auto"] | None = None
    model: Name | None = None
    """The image model, if the requested model only calls it (the Responses API's tool)."""
    count: Annotated[int, Meta(ge=1, le=10)] = 1
    previews: Annotated[int, Meta(ge=0, le=3)] = 0
    """Maximum number of previews per image."""
    mask: ImagePart | None = None
    """Which areas of the request's (first) image may change: a PNG of the same size, transparent there (OpenAI)."""
    deliver: Literal["blob", "base64"] = "blob"
    """Whether events carry the images' blob ids or their bytes."""


class Fallback(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A provider and model to try if the earlier ones failed."""

    provider: Name
    model: Name
    extra: dict[str, object] | None = None
    """Replaces the request's `extra`, which goes only to the request's own provider."""


class Generate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="generate", tag_field="type"):
    """One generation request. A repeated ``id`` is the same run."""

    provider: Name
    """The NAME of a configured provider; keys never travel."""
    model: Name
    messages: Annotated[list[Message], Meta(min_length=1)]
    id: RunId | None = None
    parent: RunId | None = None
    """The run whose tool call begins this run. Only tool executors set it; ``id`` follows from it and the call."""
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
    """Maximum tool turns of the run; 0: calls are reported but never run."""
    tool_timeout_s: Annotated[float, Meta(gt=0)] | None = None
    on_failure: OnFailure = "before_first_visible"
    deadline_s: Annotated[float, Meta(gt=0)] | None = None
    """Seconds from acceptance until the run fails with class timeout."""
    max_added_ms: Annotated[float, Meta(ge=0, le=1000)] | None = None
    """How long the bus may hold a chunk back to write several together, in milliseconds; never what begins or ends a
    block, nor a block's first chunk. None: the deployment's setting.
    """
    durability: DurabilityLevel | None = None
    """``replicated``: the request, a tool's call and the run's end count once they are where the deployment's
    `[durability]` says, so that no fail-over loses them. None: the provider's, or the deployment's.
    """
    participant: str | None = None
    metadata: dict[str, object] | None = None
    """The caller's own data; returned in `started`, never sent to the provider."""
    extra: dict[str, object] | None = None
    """Merged into the provider's request body unchanged, for options without a field here."""
    prefill: PrefillOptions | None = None
    """Mode prefill only."""
    unsigned_thinking: Literal["drop", "text", "error"] = "drop"
    """What becomes of thinking in `messages` that the provider does not accept back (unsigned, or another provider's).
    ``drop``: it is left out, with a note. ``text``: it is sent as `<thinking>` text. ``error``: the run fails.
    """
    names_in_text: bool = False
    """Mode chat: write participant names into the texts (`Ann: …`). Otherwise they go into the name field of Chat
    Completions; for other APIs they are dropped, with a note.
    """
    images: ImageOptions | None = None
    """Mode chat only: ask the model for images."""
    record: bool | None = None
    """Whether request, raw stream and result are kept for `tokenbus replay`; None: the deployment's setting."""
    visible: bool = True
    """False: no text of this run is visible. For internal queries of services."""
    commentary: Literal["visible", "hidden"] = "visible"
    """Whether text is visible that the model marks as commentary on its work (OpenAI's ``phase``)."""
    policies: list[Name] = []
    """Configured policies that judge this run, after those of its route."""
    input_policies: list[Name] = []
    """Configured policies that judge the request's texts before a provider gets them, after those of its route."""
    webhooks: Annotated[list[Name], Meta(max_length=16)] = []
    """Configured receivers of webhooks that are told how this run ends, besides those that are told of every run."""
    fallback: Annotated[list[Fallback], Meta(max_length=8)] | None = None
    """Providers and models to try in turn if a turn fails before any of its visible text was emitted; with
    ``on_failure`` `continue` also later, those that can continue the text. None: the deployment's setting; an empty
    list: none.
    """
    json_object: bool = False
    """The answer must be a JSON object, of no certain schema. Mode chat only; not with ``output_schema``."""
    parallel_tool_calls: bool | None = None
    """False: one tool call per turn at most. None: the API's default, which allows several. Mode chat only."""
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    """Asks for the same answer to the same request, as far as the provider can."""
    top_k: Annotated[int, Meta(ge=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    user_id: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    """An opaque id of the person behind the request, for the provider's abuse detection. Unlike ``participant``, it is
    never part of the text.
    """
    traceparent: Annotated[str, Meta(pattern=TRACEPARENT_PATTERN)] | None = None
    """W3C trace context of the publisher: the run's spans belong to its trace, and its sampling holds. The client sets
    it from the current OpenTelemetry context.
    """


class Cancel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="cancel", tag_field="type"):
    """Stop a run, and close its connection to the provider."""

    run: RunId
    reason: Annotated[str, Meta(max_length=1024)] | None = None
    heard_through: Annotated[int, Meta(ge=-1)] | None = None
    """The last ``seq`` that the listener heard; -1: nothing. What came after it is not part of the run's messages. The
    cancel is refused if the run has no event with this number yet.
    """
    heard_characters: Annotated[int, Meta(ge=0)] | None = None
    """How many characters (Unicode code points) of that event's text were heard; None: all of them."""


WhenBusy = Literal["enqueue", "steer", "interrupt", "reject"]
"""What becomes of a message while a run of its session is open. ``enqueue``: it starts the next run after this one.
``steer``: it goes into the run's next provider call, after the results of the present turn's tools; if there is no such
call, it starts the next run. With ``now`` the present call ends for it: the answer continues its text if provider and
model can do that, else it gets another turn; if calls of tools have begun, it waits for their results.
``interrupt``: it ends this run and starts the next one, before all that waits. ``reject``: it is returned.
"""


class HistoryBound(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How much of a session's history a request gets: about so many ``tokens``, and what happens to the rest.

    - ``oldest``: the messages of the oldest runs are left out, with a note.
    - ``summary``: a model summarises them in a run of its own, which this run waits for.
    - ``provider``: all is sent, and the provider is told to compact it when it has so many tokens. With an API that
      cannot do that, as ``oldest``.
    """

    tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    how: Literal["oldest", "summary", "provider"] = "oldest"
    provider: Name | None = None
    """Who summarises. None: the run's own provider, as with ``model``."""
    model: Name | None = None


class Configure(_Part, frozen=True, kw_only=True, tag="configure"):
    """The session's configuration from now on, in place of the one before. Creates the session if there is none."""

    request: dict[str, object]
    """Fields of a `Generate` that each run of the session has. Without ``id`` and ``messages``. ``provider`` and
    ``model`` may be left to the messages.
    """
    messages: list[Message] = []
    """The history that a new session begins with. Only in the append that creates it."""
    when_busy: WhenBusy = "enqueue"
    """For messages that do not say it themselves."""
    together: bool = False
    """Messages that wait start one run together."""
    history: HistoryBound | None = None
    """None: all of it is sent."""
    judged: RunId | None = None
    """Set by the bus: the run in which policies judged its texts (``input_policies``)."""


class SessionMessage(_Part, frozen=True, kw_only=True, tag="message"):
    """A message to the model, or several. It starts a run, or waits for the end of the open one."""

    content: str | list[ContentPart] = ""
    role: Literal["user", "system"] = "user"
    participant: str | None = None
    when_busy: WhenBusy | None = None
    """None: as the session's configuration says."""
    heard_through: Annotated[int, Meta(ge=-1)] | None = None
    """With ``when_busy`` `interrupt`: as in `Interrupt`."""
    heard_characters: Annotated[int, Meta(ge=0)] | None = None
    now: bool = False
    """With ``when_busy`` `steer`: do not wait for the end of the present turn."""
    messages: list[Message] = []
    """In place of ``content``: several messages, results of tools for example."""
    request: dict[str, object] = {}
    """Fields of a `Generate` that the run of this message has in place of the configured ones. Without effect if the
    message steers.
    """
    run: bool = True
    """False: it starts no run. It is history at once, behind the open run if there is one."""
    judged: RunId | None = None
    """Set by the bus: the run in which policies judged its texts (``input_policies``)."""


class Interrupt(_Part, frozen=True, kw_only=True, tag="interrupt"):
    """End the session's open run as `cancelled`; what waits starts the next one.

    ``heard_through`` and ``heard_characters``: as in `Cancel`, for the open run, or for the last one if none is open:
    speech may end after the run did.
    """

    heard_through: Annotated[int, Meta(ge=-1)] | None = None
    heard_characters: Annotated[int, Meta(ge=0)] | None = None
    run: RunId | None = None
    """The run that is meant: if there is a newer one, nothing is interrupted."""


class Withdraw(_Part, frozen=True, kw_only=True, tag="withdraw"):
    """Take back a message that still waits."""

    append: RunId


class Rewrite(_Part, frozen=True, kw_only=True, tag="rewrite"):
    """Replace the history by other messages. Runs and events stay as they are. Returned as `busy` while a run is open,
    unless ``through`` is an earlier one.
    """

    messages: list[Message]
    through: RunId | None = None
    """The last run whose messages these replace; None: the session's last one, and what was added since."""
    as_of: Annotated[int, Meta(ge=0)] | None = None
    """The newest ``session_seq`` that the caller saw. If there are newer ones, it is returned as `busy`."""
    judged: RunId | None = None
    """As in `SessionMessage`."""


class Delete(_Part, frozen=True, kw_only=True, tag="delete"):
    """Delete the session: its events, its runs and its history. An open run is cancelled first. Afterwards the name is
    free again.
    """


SessionItem = SessionMessage | Interrupt | Withdraw | Configure | Rewrite | Delete


class Append(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="append", tag_field="type"):
    """Something that a client puts into a session. A repeated ``id`` is the same append."""

    session: RunId
    """A name within the tenant, ``metadata.tenant``."""
    item: SessionItem
    id: RunId | None = None
    metadata: dict[str, object] | None = None
    """Added to the configured metadata of the run that the message starts."""


class _Decision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """Decides one wait of a run. The first decision counts; a repeated ``decision_id`` is the same one."""

    run: RunId
    wait: WaitId
    """As the run's `waiting` event names it."""
    decision_id: RunId
    by: Annotated[str, Meta(max_length=256)] | None = None
    """Who decides, for the log. The gateway sets it by the client's key."""
    door: Door = "bus"
    metadata: dict[str, object] | None = None
    """Only its ``tenant`` is read, and must be the run's."""


class Approval(_Decision, frozen=True, kw_only=True, tag="approval"):
    """Whether a tool call may run."""

    decision: Literal["allow", "deny"]
    reason: Annotated[str, Meta(max_length=4000)] | None = None
    """Of a denial: the model reads it."""
    arguments: dict[str, object] | None = None
    """Runs the call with these arguments instead, which must match the tool's schema."""


class Answer(_Decision, frozen=True, kw_only=True, tag="answer"):
    """The answer to a question of a tool."""

    decision: Literal["accept", "decline", "cancel"] = "accept"
    """``decline``: the person does not want to answer. ``cancel``: the person left."""
    content: dict[str, object] | None = None
    """Must match the question's schema."""


class ToolResult(_Decision, frozen=True, kw_only=True, tag="tool_result"):
    """The result of a tool that a client runs."""

    content: Any = ""
    """Text, or what matches the tool's ``result`` schema."""
    is_error: bool = False


WaitDecision = Approval | Answer | ToolResult
Request = Generate | Cancel | Append | WaitDecision


def is_run_id(text: str) -> bool:
    try:
        msgspec.convert(text, RunId)
    except msgspec.ValidationError:
        return False
    return True
