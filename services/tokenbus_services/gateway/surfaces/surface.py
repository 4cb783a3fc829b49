"""The skeleton of every surface: the steps that all requests share, and what a surface adds to them. Pure."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar, cast, get_args

import msgspec

from tokenbus.events import requests
from tokenbus.events.public import RunEnd
from tokenbus.events.waits import Door, WaitKind
from tokenbus.providers import registry
from tokenbus.providers.api import ApiName
from tokenbus.providers.base import ProviderBase
from tokenbus.providers.request.build import deep_merged
from tokenbus.providers.request.options import RequestOption
from tokenbus_services.gateway.problem import (
    DROPPABLE,
    Problem,
    Refusal,
    extra_not_open,
    invalid,
    tool_not_open,
    unsupported,
)
from tokenbus_services.gateway.surfaces.contract import (
    Answer,
    Disconnect,
    Encoder,
    GatewayNote,
    GatewayRequest,
    Translated,
    TranslationRules,
    WholeAnswer,
    WholeStream,
)
from tokenbus_services.gateway.surfaces.fields import Fields, Json, Reading, Removals, json_body

T = TypeVar("T")
HEADER = "x-tokenbus-"
NOT_HERE = "is not supported by this provider"
DEFAULT_MODEL = "default"
"""The alias of requests that name no model, on surfaces whose clients know none."""
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
NEVER_PASSED: Mapping[str, object] = {
    **dict.fromkeys(("models", "route", "preset", "engine", "deployment", "deployment_id", "fallbacks")),
    **dict.fromkeys(("fallback_models", "context_window_fallbacks", "custom_llm_provider")),
    **dict.fromkeys(("api_base", "base_url", "api_key", "api_version")),
    **dict.fromkeys(("stream_options", "function_call", "background_options")),
    **dict.fromkeys(("conversation", "prompt", "cachedContent")),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens")),
    "max_tokens_to_sample": None,
    "n": 1,
    "best_of": 1,
    "functions": [],
    "generationConfig.candidateCount": 1,
}
"""Fields that are not passed to a provider of the same API, with the value of each that changes nothing: they select
the model or where it runs, change the form of the answer, put a part of the conversation where the bus does not see it,
or are another API's name for the bound of the answer, which a key may have lowered. Of a surface, those that it reads
are not among them.
"""
ONLY_JSON = "Answer with one JSON object and nothing else: no text before or after it, no code fence."
"""For a provider without a mode for JSON of any schema."""
_LISTS = ("tools", "policies", "input_policies", "webhooks")
_FLAGS = ("visible", "record", "stream")
_NUMBERS = ("max_tool_depth", "deadline_s", "max_added_ms")
_TEXTS = ("run", "on_failure", "on_disconnect")


class Echo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What encoders know of the request, in `GatewayNote.echo`. A surface adds fields of its own."""

    api: ApiName = ""
    """Of the provider that the request names; empty for a run that another service published."""
    apis: dict[str, ApiName] = {}
    """Of the providers that may answer in its place."""
    on_failure: requests.OnFailure | None = None
    bus_tools: bool = False
    """The bus runs the calls, so the client does not see them: it would run them again."""

    def api_of(self, end: RunEnd) -> ApiName:
        """The API of the provider that answered."""
        return self.apis.get(end.provider or "", self.api)


class SurfaceRequest:
    """A client's request while its surface reads it.

    The model, the extension (`tokenbus` in the body, or headers `x-tokenbus-…`; the body wins), the run's id, tools,
    options, fallback and echo are made here. The surface reads the other fields of ``body``, and those of ``bus`` that
    it alone has. A field that neither reads is an error, or passed on if `passes`.
    """

    def __init__(
        self,
        asked: GatewayRequest,
        rules: TranslationRules,
        body: Fields,
        *,
        model: str,
        stream: bool,
        speaks: ApiName | None = None,
        options: Fields | None = None,
        takes_back: bool = False,
        shows_arguments: bool = False,
    ) -> None:
        """``speaks``: the API of the surface. ``options``: the object that has `tokenbus`; None: the body.
        ``takes_back``: a stream can void text. ``shows_arguments``: the answer has the arguments of a call as they
        are written, and cannot void them. Raises Refusal.
        """
        self.body = body
        self.headers = asked.headers
        self.stream = stream
        self.model = rules.models.resolve(model)
        apis = {self.model.api, *self.model.apis.values()}
        self.has = _options_of(apis)
        """The optional request fields that every provider of the model has."""
        self._needs_word = not str(speaks).startswith("openai-") and any(api.startswith("openai-") for api in apis)
        self.passes = apis == {speaks}
        """Every provider speaks the client's API, so it gets what the gateway does not know."""
        body.reading.passes = self.passes
        self.extra: Json = {}
        """For the provider's own body."""
        self.instructions: list[str] = []
        """Sentences for the model, in place of options that the provider lacks."""
        within = (options or body).json("tokenbus") or {}
        at = (options or body).path("tokenbus")
        self.bus = bus = Fields({**_of_headers(asked.headers), **within}, at, Reading(rules.drop_unsupported))
        self.run = _run_id(bus)
        self.bus_tools = _bus_tools(bus, rules)
        self._of_clients = rules.client_tools
        self.max_tool_depth = bus.whole("max_tool_depth")
        self.on_failure = cast("requests.OnFailure | None", bus.one_of("on_failure", get_args(requests.OnFailure)))
        self.deadline_s = _deadline(bus)
        self._max_added_ms = _max_added(bus)
        self.visible = bus.flag("visible")
        self._policies = bus.texts("policies")
        self._input_policies = bus.texts("input_policies")
        self._webhooks = bus.texts("webhooks")
        self._record = bus.flag("record")
        self._provider_stream = bus.flag("stream")
        self._on_disconnect: Disconnect | None = _on_disconnect(bus)
        self._asked_extra = _extra(bus, rules)
        self._shows_arguments = shows_arguments
        if stream and self.on_failure == "restart" and not takes_back:
            why = "'restart' takes back text, which this protocol cannot; do not stream"
            raise unsupported(bus.path("on_failure"), why)

    @property
    def client_tools(self) -> list[str]:
        """Those of the bus's tools whose calls wait for the client."""
        return [tool.name for tool in self.bus_tools if tool.kind == "client" or tool.name in self._of_clients]

    # --- steps of several surfaces --------------------------------------------------------------------------------

    def optional(
        self, option: RequestOption, fields: Fields, name: str, read: Callable[[str], T | None], *neutral: object
    ) -> T | None:
        """Read the field of an option; leave it out if the provider lacks that. ``neutral`` values are what it does
        anyway.
        """
        if option in self.has:
            return read(name)
        fields.hint(name, *neutral)
        return None

    def need(self, option: RequestOption, name: str, *neutral: object, of: Fields | None = None) -> None:
        """Refuse the field of an option that the provider lacks, since leaving it out would change the meaning."""
        if option not in self.has:
            (of or self.body).only(name, *neutral, why=NOT_HERE)

    def one_call(
        self, name: str, neutral: object, *, tools: Sequence[requests.Tool], choice: object, of: Fields | None = None
    ) -> None:
        """Read the field that forbids parallel calls. It is a hint if the model must call the only tool there is, as
        clients ask for an object by a schema; else it is refused if the provider lacks it.
        """
        only = isinstance(choice, requests.ToolChoice) or (choice == "any" and len(tools) == 1 and not self.bus_tools)
        if only and "parallel_tool_calls" not in self.has:
            (of or self.body).hint(name, neutral)
        else:
            self.need("parallel_tool_calls", name, neutral, of=of)

    def json_object(self) -> Json:
        """The bus's field for JSON of any schema, or a sentence to the model of a provider without one."""
        if "json_object" in self.has:
            return {"json_object": True}
        self.instructions.append(ONLY_JSON)
        return {}

    def raw_tools(self, tools: Sequence[requests.Tool | Json]) -> list[requests.Tool]:
        """The tools that the bus knows. The others go to the provider as they are."""
        if raw := [tool for tool in tools if not isinstance(tool, requests.Tool)]:
            self.extra["tools"] = raw
        return [tool for tool in tools if isinstance(tool, requests.Tool)]

    def is_raw_tool(self, chosen: object, tools: Sequence[requests.Tool]) -> bool:
        """Whether the choice of one tool, by its `name`, is of one that goes to the provider as it is: so does the
        choice.
        """
        name = cast("Json", chosen).get("name") if isinstance(chosen, dict) else None
        return "tools" in self.extra and name is not None and name not in {tool.name for tool in tools}

    def refuse_hidden(self) -> None:
        """Raise Refusal for a run without visible text: a chat shows its text."""
        if self.visible is False:
            raise unsupported(self.bus.path("visible"), "a chat shows its text")

    def translated(
        self,
        fields: Json,
        *,
        tools: Sequence[requests.Tool] = (),
        echo: type[Echo] = Echo,
        echoed: Json | None = None,
        background: bool = False,
        on_disconnect: Disconnect = "cancel",
    ) -> Translated:
        """The request of the bus. ``fields``: those of `Generate` that the surface has read. Raises Refusal."""
        fields = {**fields, **self._tool_fields(list(tools))}
        if self.instructions:
            fields["system"] = _and_said(fields.get("system"), self.instructions)
        if fields.get("json_object") and self._needs_word and not _mentions_json(fields):
            fields["messages"] = [requests.Message(role="system", content=ONLY_JSON), *fields["messages"]]
        self.bus.end()
        self.body.end()
        if self.passes:
            rest = self.body.rest()
            for path, neutral in NEVER_PASSED.items():
                within, _, name = path.rpartition(".")
                given: Json = rest.get(within, {}) if within else rest
                if given.pop(name, neutral) != neutral:
                    raise unsupported(path, f"{name!r} is not supported by this gateway")
                if within and not given:
                    rest.pop(within, None)
            self.extra = deep_merged(rest, self.extra)
        if self._shows_arguments and self.on_failure is None and (tools or "tools" in self.extra):
            self.on_failure = "before_first_output"
        extra = deep_merged(self.extra, self._asked_extra or {}) or None
        given = {
            "on_failure": self.on_failure,
            "deadline_s": self.deadline_s,
            "max_added_ms": self._max_added_ms,
            "policies": self._policies or None,
            "input_policies": self._input_policies or None,
            "webhooks": self._webhooks or None,
            "visible": self.visible,
            "record": self._record,
            "stream": self._provider_stream,
        }
        fields |= {name: value for name, value in given.items() if value is not None}
        generate = requests.Generate(
            provider=self.model.provider,
            model=self.model.model,
            fallback=None if self.on_failure == "fail" else self._fallbacks(),
            extra=extra,
            **{name: value for name, value in fields.items() if value is not None},
        )
        noted = echo(
            api=self.model.api,
            apis=dict(self.model.apis),
            on_failure=generate.on_failure,
            bus_tools=bool(self.bus_tools),
            **echoed or {},
        )
        if background:
            on_disconnect = "continue"
        elif self._on_disconnect:
            on_disconnect = self._on_disconnect
        return Translated(
            generate=generate,
            stream=self.stream,
            model=self.model.name,
            run=self.run,
            echo=msgspec.to_builtins(noted),
            left_out=[*self.bus.reading.left_out, *self.body.reading.left_out],
            on_disconnect=on_disconnect,
            background=background,
        )

    def _tool_fields(self, own: list[requests.Tool]) -> Json:
        """Tools of the client, which runs the calls itself, or of the deployment."""
        if not self.bus_tools:
            if self.max_tool_depth:
                why = "this needs tools of the deployment: tokenbus.tools"
                raise unsupported(self.bus.path("max_tool_depth"), why)
            return {"tools": own, "max_tool_depth": 0}
        if own or "tools" in self.extra:
            raise unsupported(
                self.bus.path("tools"), "a request names tools of the client or of the deployment, not both"
            )
        return {"tools": self.bus_tools, "max_tool_depth": self.max_tool_depth}

    def _fallbacks(self) -> list[requests.Fallback] | None:
        """The providers of an alias after the first. What is passed to the first goes to those of the same API."""
        extra = self.extra if self.passes and self.extra else None
        found = [
            requests.Fallback(provider=each.provider, model=each.model, extra=extra) for each in self.model.fallback
        ]
        return found or None


class Surface(ABC):
    """One client protocol."""

    name: ClassVar[str]
    door: ClassVar[Door] = "http"
    """What the log says of decisions that come in this protocol."""
    version: ClassVar[int] = 1
    """Raised if the bytes for the same log change."""
    media_type: ClassVar[str] = "text/event-stream; charset=utf-8"
    keep_alive: ClassVar[bytes]
    """Sent after some seconds of silence; carries no number, and no client takes it for an event."""
    stream_headers: ClassVar[Mapping[str, str]] = {}
    """In addition to those of every stream."""
    inlines_media: ClassVar[bool] = False
    """The protocol has no address for an image or a sound, so its encoders get the bytes of those in the blob store."""
    paths: ClassVar[Sequence[str]] = ()
    """Where requests are posted."""
    spelling: ClassVar[Callable[[str], str] | None] = None
    """Maps each name of a body to the one under which it is read."""

    def translate(self, asked: GatewayRequest, rules: TranslationRules) -> Translated:
        """Translate a request. Raises Refusal, with the parameter's name, for anything that cannot be honoured.

        What is refused although `drop_unsupported` names it is left out, and the rest is read again: see `Removals`.
        """
        spelling = type(self).spelling
        removals = Removals(json_body(asked.body), spelling)
        while True:
            try:
                found = self.read(
                    asked, rules, Fields(removals.body, reading=Reading(rules.drop_unsupported, spelling))
                )
            except RecursionError:
                raise invalid(None, "the body's JSON is nested too deeply") from None
            except Refusal as e:
                param, path = e.problem.param or "", Reading.plain(e.problem.param or "")
                is_dropped = e.problem.code in DROPPABLE and path in rules.drop_unsupported
                if not (removals.add(param) if is_dropped else removals.missed(param)):
                    raise
                asked = msgspec.structs.replace(asked, headers=_without_option(asked.headers, path))
            else:
                left_out = dict.fromkeys([*removals.paths, *found.left_out])
                return msgspec.structs.replace(found, left_out=[*left_out])

    @staticmethod
    @abstractmethod
    def read(asked: GatewayRequest, rules: TranslationRules, body: Fields) -> Translated:
        """Read a request. Raises Refusal."""

    def waits_for(self, note: GatewayNote) -> frozenset[WaitKind]:
        """What clients can decide with another request. An answer ends where its run waits for nothing else. Empty: the
        protocol has no way to decide anything, and its answers stay open.
        """
        return frozenset()

    @abstractmethod
    def encoder(self, request: GatewayRequest | None, note: GatewayNote, run: str) -> Encoder:
        """An encoder for a streamed answer. ``request`` is the one that asks, None if it is not at hand."""

    def whole(self, note: GatewayNote, run: str) -> WholeAnswer:
        """A collector for an answer that is not streamed."""
        return WholeStream(self.encoder(None, note, run), self.media_type, self.stream_headers)

    @staticmethod
    @abstractmethod
    def refusal(problem: Problem) -> Answer:
        """A problem before the first byte, in the client's own error shape."""


def effort_thinking(effort: str | None) -> requests.Thinking | None:
    """How much to think, for an effort by name."""
    if effort is None:
        return None
    return (
        requests.Thinking(enabled=False)
        if effort == "none"
        else requests.Thinking(effort=cast("requests.Effort", effort))
    )


def client_metadata(body: Fields) -> Json | None:
    """The client's `metadata`, as OpenAI bounds it. Raises Refusal."""
    given = body.json("metadata")
    if not given:
        return None
    if len(given) > MAX_METADATA:
        raise invalid("metadata", f"may have at most {MAX_METADATA} keys")
    for key, value in given.items():
        if len(key) > MAX_METADATA_KEY:
            raise invalid("metadata", f"a key may have at most {MAX_METADATA_KEY} characters")
        if not isinstance(value, str) or len(value) > MAX_METADATA_VALUE:
            raise invalid(f"metadata.{key}", f"must be a string of at most {MAX_METADATA_VALUE} characters")
    return {"client": given}


def format_of(fields: Fields) -> requests.InputFormat:
    """The `format` of a custom tool of OpenAI, of Responses or of Chat Completions. Raises Refusal."""
    form = fields.fields("format")
    if form is None or form.needed("type", form.one_of("type", ("text", "grammar"))) == "text":
        return requests.TextFormat()
    if form.has("grammar"):
        form = form.needed("grammar", form.fields("grammar"))
    syntax = cast('Literal["lark", "regex"]', form.needed("syntax", form.one_of("syntax", ("lark", "regex"))))
    return requests.GrammarFormat(syntax=syntax, definition=form.needed("definition", form.text("definition") or None))


def open_tool(name: str, rules: TranslationRules, at: str) -> requests.Tool:
    """A tool of the deployment. Raises Refusal if it is not open to the client."""
    if rules.tools is not None and name not in rules.tools:
        raise invalid(at, tool_not_open(name))
    return requests.Tool(name=name)


def _options_of(apis: set[ApiName]) -> frozenset[RequestOption]:
    options = frozenset[RequestOption](get_args(RequestOption))
    for api in apis:
        provider = registry.get(api)
        if isinstance(provider, ProviderBase):  # of an API from another package the bus itself knows
            options &= provider.options
    return options


def _mentions_json(fields: Json) -> bool:
    """Whether a message has the word without which OpenAI's APIs refuse to answer with JSON of any schema. Their own
    clients know that.
    """
    return b"json" in msgspec.json.encode(fields["messages"]).lower()


def _and_said(system: Any, sentences: list[str]) -> Any:
    if isinstance(system, list):
        return [*cast("list[requests.TextPart]", system), *(requests.TextPart(text=each) for each in sentences)]
    return "\n\n".join(([system] if system else []) + sentences)


def _run_id(bus: Fields) -> str | None:
    value = bus.text("run")
    try:
        return msgspec.convert(value, requests.RunId | None)
    except msgspec.ValidationError as e:
        raise invalid(bus.path("run"), str(e)) from None


def _bus_tools(bus: Fields, rules: TranslationRules) -> list[requests.Tool]:
    return [open_tool(name, rules, f"{bus.path('tools')}[{i}]") for i, name in enumerate(bus.texts("tools"))]


def _deadline(bus: Fields) -> float | None:
    value = bus.number("deadline_s")
    if value is not None and value <= 0:
        raise invalid(bus.path("deadline_s"), "must be greater than 0")
    return value


def _max_added(bus: Fields) -> float | None:
    value = bus.number("max_added_ms")
    if value is not None and not 0 <= value <= 1000:
        raise invalid(bus.path("max_added_ms"), "must be from 0 to 1000")
    return value


def _on_disconnect(bus: Fields) -> Disconnect | None:
    return cast("Disconnect | None", bus.one_of("on_disconnect", get_args(Disconnect)))


def _extra(bus: Fields, rules: TranslationRules) -> dict[str, object] | None:
    extra = bus.json("extra")
    for name in extra or {}:
        if name not in rules.allow_extra:
            raise extra_not_open(f"{bus.path('extra')}.{name[:100]}")
    return extra


def _of_headers(headers: Mapping[str, str]) -> Json:
    """The options of the headers, in the form that the body has. Raises Refusal."""
    read: dict[str, Any] = {}
    for name in (*_LISTS, *_FLAGS, *_NUMBERS, *_TEXTS):
        header = HEADER + name.replace("_", "-")
        value = headers.get(header)
        if value is None:
            continue
        if name in _LISTS:
            read[name] = [each.strip() for each in value.split(",") if each.strip()]
        elif name in _FLAGS:
            if value not in ("true", "false"):
                raise invalid(header, "must be true or false")
            read[name] = value == "true"
        elif name in _NUMBERS:
            read[name] = seconds(value, header, "a number")
        else:
            read[name] = value
    return read


def _without_option(headers: Mapping[str, str], path: str) -> Mapping[str, str]:
    """The headers without that of an option of the bus, by the option's path."""
    _, is_option, option = path.rpartition("tokenbus.")
    gone = HEADER + option.replace("_", "-")
    return {name: value for name, value in headers.items() if name != gone} if is_option else headers


def seconds(value: str, header: str, what: str) -> float:
    """The number in a header. Raises Refusal."""
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise invalid(header, f"must be {what}")
    return number
