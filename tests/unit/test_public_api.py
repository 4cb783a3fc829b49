"""The names that users import. One that goes or changes breaks them; one that comes is a promise."""

from __future__ import annotations

import inspect

import tokenbus
from tokenbus import errors, providers


def test_these_names_are_public():
    assert sorted(tokenbus.__all__) == [
        "BlockComplete",
        "BlockStarted",
        "Cancelled",
        "Chunk",
        "Client",
        "Completed",
        "Cursor",
        "Decided",
        "Generate",
        "ImagePreview",
        "Incomplete",
        "Message",
        "OrderedSubscription",
        "PublicEvent",
        "Response",
        "ResponseBuilder",
        "Restarted",
        "Retrying",
        "Run",
        "RunFailedEvent",
        "Sentence",
        "SentenceRules",
        "SentenceSubscription",
        "SharedSubscription",
        "Started",
        "TerminalEvent",
        "TokenbusError",
        "Tool",
        "ToolProgress",
        "UnknownEvent",
        "UsageReported",
        "__version__",
        "coalesced",
        "restore_from_storage",
        "sanitize_for_storage",
    ]
    assert all(hasattr(tokenbus, name) for name in tokenbus.__all__)


def test_a_package_with_a_provider_api_of_its_own_may_use_these_names():
    assert sorted(providers.__all__) == [
        "BlockStart",
        "BlockStop",
        "Built",
        "Cut",
        "Decoder",
        "Done",
        "ErrorInfo",
        "Failed",
        "Format",
        "Generate",
        "HttpCall",
        "Malformed",
        "MediaLimits",
        "Message",
        "Mode",
        "Normalized",
        "Provider",
        "ProviderBase",
        "Quirks",
        "RefusalDelta",
        "RequestInvalid",
        "ResponseDecoder",
        "Spoken",
        "SseEvent",
        "Start",
        "Takes",
        "Terminal",
        "TextDelta",
        "TextPart",
        "ThinkingDelta",
        "ThinkingPart",
        "ToolCallDelta",
        "ToolCallDone",
        "ToolCallPart",
        "ToolCallStart",
        "ToolResultPart",
        "Usage",
        "UsageSeen",
        "conversation",
        "finish_of",
        "needs_tools",
        "provider_failure",
        "schema_of",
        "told_stops",
        "with_extra",
    ]
    assert all(hasattr(providers, name) for name in providers.__all__)


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
        "cancel": ["self", "run", "reason", "heard_through"],
        "follow": ["self", "run", "after", "wait_s"],
        "messages": ["self", "run", "wait_s"],
        "publish": ["self", "request", "wait"],
        "resume": ["self", "run", "again"],
        "result": ["self", "run", "wait_s"],
        "retry": ["self", "run", "again"],
        "sentences": ["self", "group", "runs", "from_", "ack", "prefetch", "rules", "hold_s", "on_trimmed"],
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
    assert set(public(tokenbus.Run)) == {"events", "result", "messages", "cancel"}
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
        "provider_extra",
        "participant",
    )
    assert set(public(tokenbus.Response)) == {"images", "messages", "or_raise", "tool_calls"}
    assert set(public(tokenbus.ResponseBuilder)) == {"add", "response"}


def test_every_error_is_in_the_tree_with_a_code_of_its_own():
    tree = [getattr(errors, name) for name in errors.__all__]
    assert all(issubclass(error, tokenbus.TokenbusError) for error in tree)
    assert len({error.code for error in tree}) == len(tree)
    assert errors.__doc__
    assert all(name in errors.__doc__ for name in errors.__all__)
