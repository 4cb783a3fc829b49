"""The names that users import. One that goes or changes breaks them; one that comes is a promise."""

from __future__ import annotations

import inspect

import tokenbus
from tokenbus import errors


def test_these_names_are_public():
    assert sorted(tokenbus.__all__) == [
        "BlockComplete",
        "BlockStarted",
        "Cancelled",
        "Chunk",
        "Client",
        "Completed",
        "Cursor",
        "Generate",
        "Incomplete",
        "Message",
        "OrderedSubscription",
        "PublicEvent",
        "Restarted",
        "Result",
        "Retrying",
        "Run",
        "RunFailedEvent",
        "SharedSubscription",
        "Started",
        "TerminalEvent",
        "TokenbusError",
        "Tool",
        "UsageReported",
        "__version__",
    ]
    assert all(hasattr(tokenbus, name) for name in tokenbus.__all__)


def public(kind: type) -> dict[str, str]:
    members = inspect.getmembers(kind, lambda m: inspect.isfunction(m) or isinstance(m, property))
    return {
        name: str(inspect.signature(member)) if inspect.isfunction(member) else "property"
        for name, member in members
        if not name.startswith("_")
    }


def test_a_client_has_these_methods():
    assert {
        name: list(inspect.signature(getattr(tokenbus.Client, name)).parameters) for name in public(tokenbus.Client)
    } == {
        "aclose": ["self"],
        "cancel": ["self", "run", "reason", "heard_through"],
        "follow": ["self", "run", "after", "wait_s"],
        "publish": ["self", "request"],
        "result": ["self", "run", "wait_s"],
        "stream": ["self", "request", "wait_s"],
        "subscribe": ["self", "topic", "group", "after"],
    }
    assert list(inspect.signature(tokenbus.Client).parameters) == [
        "url",
        "prefix",
        "partitions",
        "reconnect_s",
        "max_waiting",
        "max_request_bytes",
    ]


def test_a_run_and_subscriptions_have_these_members():
    assert set(public(tokenbus.Run)) == {"events", "result", "cancel"}
    assert set(public(tokenbus.OrderedSubscription)) == {"aclose", "cursor"}
    assert set(public(tokenbus.SharedSubscription)) == {"aclose", "partitions"}


def test_a_result_has_these_fields():
    assert tokenbus.Result.__struct_fields__ == (
        "run",
        "status",
        "text",
        "thinking",
        "blocks",
        "finish",
        "finish_raw",
        "usage",
        "timing",
        "error",
        "reason",
        "events",
    )
    assert set(public(tokenbus.Result)) == {"or_raise", "tool_calls"}


def test_every_error_is_in_the_tree_with_a_code_of_its_own():
    tree = [getattr(errors, name) for name in errors.__all__]
    assert all(issubclass(error, tokenbus.TokenbusError) for error in tree)
    assert len({error.code for error in tree}) == len(tree)
    assert errors.__doc__
    assert all(name in errors.__doc__ for name in errors.__all__)
