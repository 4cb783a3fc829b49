"""The names that users import. One that goes or changes breaks them; one that comes is a promise."""

from __future__ import annotations

import ast
import importlib
import inspect
import typing
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tokenbus
import tokenbus.sync
from tokenbus import errors
from tokenbus.client.client import PUBLISHED_WAIT_S

FACADE = {
    "tokenbus": """
        Answering AnyRun AudioRef Base64Source BlobLoader BlobRef BlobSource BlobStreams Blobs BlockComplete
        BlockProgress BlockStarted Cancelled Chunk Client Completed Cursor Decided DocumentPart ErrorInfo ExtraPart
        Fallback FileSource Generate GrammarFormat ImageOptions ImagePart ImagePreview ImageRef Incomplete Message
        OrderedSubscription OutputSchema PrefillOptions ProviderModel PublicEvent Response ResponseBuilder Restarted
        Retrying Run RunFailedEvent RunInfo RunResult Sentence SentenceRules SentenceSubscription SharedSubscription
        Started TerminalEvent TextFormat TextPart Thinking ThinkingPart Timing TokenbusError Tool ToolCallPart
        ToolChoice ToolProgress ToolResultPart UnknownEvent UrlSource Usage UsageReported __version__ blob_id_of
        coalesced restore_from_storage sanitize_for_storage unnamed_where
        Append Configure Delete HistoryBound Interrupt Rewrite SessionMessage Withdraw
        Answer Approval ChildEnded ChildStarted Condition Excluded Resumed ToolResult WaitFate WaitInfo Waiting
        Appended Configured Deleted Delivered Fate Returned RunEnded Receipt Session SessionCursor SessionInfo
        SessionStep SessionTopicEvent TreeCursor TreeStep UnknownSessionEvent
    """,
    "tokenbus.policy": """
        Block BoundPolicy CallJudge CallJudgeOptions ContentStreamBlock Decision Handling NewText NewToolCall
        OpenAIChunks OtherStreamBlock PolicyStream PublicEvents RedactSecrets RedactSecretsOptions Replace
        ReplaceText ReplaceTextOptions Rule ServerToolStreamBlock StreamBlock StreamContext StreamProcessor
        StreamState ToolCallGate StreamFormat ToolCallStreamBlock ToolRules ToolRulesOptions Verdict apply_policies
    """,
    "tokenbus.shaping": """
        Coalescer JsonElement JsonElements RunElement RunElements SentenceRules Sentences
    """,
    "tokenbus.errors": """
        AlreadyDecided DecisionPending WaitNotFound
        AppendPending AttemptRefused BlobCorrupt BlobError BlobNotFound BlobQuotaExceeded BlobRefused BlobStoreFull
        BlobTooLarge BlobUnauthorized BlobUnavailable CannotRetry CircularValue CursorAhead CursorTrimmed
        DeadNotFound DeploymentMismatch InputRejected Malformed NestedTooDeep NotStorable PoisonRequest PublishQueueFull
        RecordNotFound RepartitionRefused RequestError RequestInvalid RequestTooLarge RunCancelled RunError
        RunFailed RunIncomplete RunLost RunNotFound RunNotRepeatable RunOpen ServerError ServerFull ServerTooOld
        ServerUnavailable SessionNotFound SessionReplaced SettingsError TokenbusError TooLarge ToolFailure WireError
        WriteNotReplicated
    """,
    "tokenbus.tools": """
        Answered Ask Image Report ToolContext
    """,
    "tokenbus.sync": """
        Blobs Client Run Session Subscription
    """,
    "tokenbus.faststream": """
        BusRouter
    """,
    "tokenbus.testing": """
        CutOff Delivery ErrorEvent Exchange Fixed HangUp HttpRequest LocalBus ModelRequest NoSuchModel Offsets Picture
        Random Recording Reply Stall Status ToolCall Turn Whole Wire
    """,
    "tokenbus.providers": """
        ApprovalAsked Audio Auth BlockStart BlockStop Built CallToSign Cut Decoder Done ErrorInfo Extra Failed
        FileAnswer FileApi FileCall FileToUpload Format Generate HttpCall Image ItemProgress ItemStart JobApi
        JobSeen Malformed MediaLimits Message Mode Normalized Opaque Provider ProviderBase ProviderFile Quirks
        RefusalDelta RequestInvalid ResponseDecoder Spoken SseEvent Start SteerApi SteerSeen Takes Terminal
        TextDelta TextPart
        ThinkingDelta ThinkingPart ThinkingTags Token TokenAuth ToolCallDelta ToolCallDone ToolCallPart
        ToolCallStart ToolResultPart TranscriptDelta Usage UsageSeen conversation finish_of needs_tools
        provider_failure schema_of accepted_stops with_extra
    """,
}
"""The modules that users import from, and all names of each."""

BUILT_BY_TOKENBUS = {
    "Blobs",
    "OrderedSubscription",
    "Run",
    "SentenceSubscription",
    "Session",
    "SharedSubscription",
    "StreamContext",
    "Subscription",
}
"""Classes whose objects users are given. What their constructors take is no promise."""
NOT_FOR_USERS = {"RecordedDecision", "CallOutcome", "ImagesRequested", "Topic"}
"""Types that only the bus's own services hand to each other, by methods that users have no reason to call."""
BEHIND_THE_FACADE = {
    "StreamFormat",  # users hand one of these three to PolicyStream and call nothing of it
    "OpenAIChunks",
    "PublicEvents",
    "ResponseDecoder",  # docs/guides/providers.md names the three methods that a decoder of one's own overrides
}


@pytest.mark.parametrize("module", FACADE)
def test_these_names_are_public(module: str) -> None:
    facade = importlib.import_module(module)
    # The errors are defined where they are imported from, so their module lists them no second time.
    defined = [name for name, value in vars(facade).items() if inspect.isclass(value) and value.__module__ == module]
    names: list[str] = getattr(facade, "__all__", defined)
    assert sorted(names) == sorted(FACADE[module].split())
    assert all(hasattr(facade, name) for name in names)


@pytest.mark.parametrize("module", FACADE)
def test_a_type_checker_sees_no_getattr_that_accepts_any_name(module: str) -> None:
    """One that it saw would make a misspelt import an `object`, without an error."""
    seen = ast.parse(inspect.getsource(importlib.import_module(module))).body
    assert "__getattr__" not in {node.name for node in seen if isinstance(node, ast.FunctionDef)}


def _callables(kind: type) -> Iterator[Callable[..., object]]:
    for name, member in inspect.getmembers(kind):
        if name.startswith("_") and (name != "__init__" or kind.__name__ in BUILT_BY_TOKENBUS):
            continue
        called = member.fget if isinstance(member, property) else member
        if inspect.isfunction(called) or inspect.ismethod(called):
            yield called


def _classes(annotation: object) -> Iterator[type]:
    if isinstance(annotation, type) and not typing.is_typeddict(annotation):  # keyword arguments, which have no name
        yield annotation
    if (origin := typing.get_origin(annotation)) is not None:
        yield from _classes(origin)
    for argument in typing.get_args(annotation):
        for each in argument if isinstance(argument, list) else [argument]:
            yield from _classes(each)


@pytest.mark.parametrize("module", FACADE)
def test_every_type_in_a_public_signature_can_be_imported_from_the_facade(module: str) -> None:
    exported = {name: getattr(importlib.import_module(m), name) for m in FACADE for name in FACADE[m].split()}
    exported |= {name: getattr(tokenbus, name) for name in tokenbus.__all__}  # `Client`: the asynchronous one
    known = {id(getattr(importlib.import_module(m), name)) for m in FACADE for name in FACADE[m].split()}
    hidden: set[str] = set()
    for name in FACADE[module].split():
        public = getattr(importlib.import_module(module), name)
        if name in BEHIND_THE_FACADE or not (inspect.isclass(public) or inspect.isfunction(public)):
            continue
        owners: list[Any] = [public, *_callables(public)] if inspect.isclass(public) else [public]
        for owner in owners:
            if owner is public and getattr(public, "_is_protocol", False):
                continue
            for annotation in typing.get_type_hints(owner, localns=exported).values():
                hidden |= {
                    f"{kind.__module__}.{kind.__qualname__}, in {owner.__qualname__}"
                    for kind in _classes(annotation)
                    if kind.__module__.startswith("tokenbus")
                    and id(kind) not in known
                    and kind.__name__ not in NOT_FOR_USERS
                }
    assert not hidden


def public(kind: type) -> dict[str, str]:
    members = inspect.getmembers(kind, lambda m: inspect.isfunction(m) or isinstance(m, property))
    return {
        name: str(inspect.signature(member)) if inspect.isfunction(member) else "property"
        for name, member in members
        if not name.startswith("_")
    }


def test_a_client_has_these_methods():
    members = public(tokenbus.Client)
    assert [name for name, kind in members.items() if kind == "property"] == ["blobs"]
    assert {
        name: list(inspect.signature(getattr(tokenbus.Client, name)).parameters)
        for name, kind in members.items()
        if kind != "property"
    } == {
        "aclose": ["self"],
        "answer": ["self", "run", "wait", "content", "decision", "by", "decision_id", "wait_s"],
        "approve": ["self", "run", "wait", "arguments", "by", "decision_id", "wait_s"],
        "decide": ["self", "decision", "wait_s"],
        "deny": ["self", "run", "wait", "reason", "by", "decision_id", "wait_s"],
        "tool_result": ["self", "run", "wait", "content", "is_error", "by", "decision_id", "wait_s"],
        "waiting": ["self", "run", "tenant", "limit", "newest_first"],
        "cancel": ["self", "run", "reason", "heard_through", "heard_characters"],
        "describe": ["self", "runs"],
        "follow": ["self", "run", "after", "wait_s", "new"],
        "follow_tree": ["self", "run", "after", "wait_s"],
        "messages": ["self", "run", "wait_s", "heard_through", "heard_characters"],
        "publish": ["self", "request", "wait"],
        "resume": ["self", "run", "again"],
        "result": ["self", "run", "wait_s"],
        "retry": ["self", "run", "again"],
        "runs": ["self", "state", "tenant", "provider", "older_than", "prefix", "limit", "oldest_first", "archived"],
        "sentences": ["self", "group", "runs", "from_", "ack", "prefetch", "rules", "hold_s", "on_trimmed"],
        "session": ["self", "name", "tenant"],
        "sessions": ["self", "tenant", "metadata", "words", "older_than", "limit", "oldest_first"],
        "stream": ["self", "request", "wait_s"],
        "subscribe": ["self", "topic", "group", "kinds", "runs", "from_", "ack", "prefetch", "on_trimmed"],
    }
    assert list(inspect.signature(tokenbus.Client).parameters) == [
        "url",
        "prefix",
        "partitions",
        "reconnect_s",
        "max_waiting",
        "max_queued",
        "max_request_bytes",
        "blobs",
        "blob_token",
    ]


def test_a_run_and_subscriptions_have_these_members():
    assert set(public(tokenbus.Run)) == {"events", "elements", "result", "messages", "cancel"}
    assert set(public(tokenbus.OrderedSubscription)) == {"ack", "aclose", "cursor", "each"}
    assert set(public(tokenbus.SentenceSubscription)) == {"ack", "aclose", "cursor", "each"}
    assert set(public(tokenbus.SharedSubscription)) == {"ack", "aclose", "each", "partitions"}


def test_a_response_has_these_fields():
    assert tokenbus.Response.__struct_fields__ == (
        "run",
        "status",
        "text",
        "last_text",
        "thinking",
        "blocks",
        "finish",
        "finish_raw",
        "stop_string",
        "usage",
        "model",
        "response_id",
        "timing",
        "error",
        "reason",
        "events",
        "heard_through",
        "heard",
        "provider_extra",
        "participant",
    )
    assert set(public(tokenbus.Response)) == {"images", "messages", "or_raise", "parsed", "tool_calls"}
    assert set(public(tokenbus.ResponseBuilder)) == {"add", "response"}


def test_every_error_is_in_the_tree_with_a_code_of_its_own():
    tree = [error for error in vars(errors).values() if isinstance(error, type) and error.__module__ == errors.__name__]
    assert all(issubclass(error, tokenbus.TokenbusError) for error in tree)
    assert len({getattr(error, "code") for error in tree}) == len(tree)  # noqa: B009 - of any class
    assert errors.__doc__
    assert all(error.__name__ in errors.__doc__ for error in tree)


def test_every_call_waits_equally_long_for_a_run_that_is_still_queued() -> None:
    defaults = {
        f"{owner.__module__}.{owner.__name__}.{name}": parameter.default
        for owner in (tokenbus.Client, tokenbus.Run, tokenbus.sync.Client, tokenbus.sync.Run)
        for name, method in inspect.getmembers(owner, inspect.isfunction)
        for parameter in inspect.signature(method).parameters.values()
        if parameter.name == "wait_s" and not name.startswith("_")
    }
    assert len(defaults) == 28
    assert set(defaults.values()) == {PUBLISHED_WAIT_S}, defaults
