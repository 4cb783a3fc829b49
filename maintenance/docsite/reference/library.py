"""The public names of the library, from their docstrings: one page a facade."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any, get_args

import msgspec

from maintenance.docsite.reference.docstrings import cell, field_docs, signature, text_of
from tokenbus.events import decisions, public, requests

FACADES = {
    "client": ("tokenbus", "Publish requests, follow runs and subscribe to topics from Python."),
    "sync": ("tokenbus.sync", "The same client for scripts and threads, without an event loop."),
    "policy-api": ("tokenbus.policy", "Write a policy that holds, changes or stops a stream."),
    "tools-api": ("tokenbus.tools", "Write a tool in Python that reports progress or returns images."),
    "providers-api": ("tokenbus.providers", "Add a provider API of your own."),
    "shaping": ("tokenbus.shaping", "Cut visible text into sentences, without a bus."),
    "faststream": ("tokenbus.faststream", "Handle bus events in a FastStream service."),
    "testing-api": ("tokenbus.testing", "Run the real bus inside your own tests."),
}
"""Each page by its name: the module, and the task that it is for."""


def pages() -> dict[str, str]:
    return {name: _page(module, task) for name, (module, task) in FACADES.items()}


def _page(name: str, task: str) -> str:
    module = importlib.import_module(name)
    lines = [f"# {name}", "", task, "", "Import from this module only; where a name is defined inside may change.", ""]
    if about := text_of(module):
        lines += [about, ""]
    others: list[str] = []
    for public_name in getattr(module, "__all__", ()):
        thing = getattr(module, public_name)
        if elsewhere := _elsewhere(thing):
            others.append(f"- `{public_name}`: {elsewhere}")
        elif isinstance(thing, type):
            lines += _class(public_name, thing)
        elif inspect.isfunction(thing):
            lines += [f"## {public_name}", "", *_code(signature(public_name, thing)), text_of(thing), ""]
        else:
            others.append(f"- `{public_name}`: `{thing!r}`")
    if others:
        lines += ["## Also in this module", "", *others, ""]
    return "\n".join(lines)


def _elsewhere(thing: Any) -> str:
    """For a name that has a page of its own: where."""
    if isinstance(thing, type) and issubclass(thing, Exception):
        return "[errors](errors.md)"
    if thing in _EVENTS:
        return "[events](events.md)"
    if isinstance(thing, type) and thing.__module__ == requests.__name__:
        return "[requests](requests.md)"
    return ""


def _events() -> Iterator[Any]:
    yield from (public.PublicEvent, public.TerminalEvent, public.UnknownEvent, decisions.Decided)
    left = [public.PublicEvent]
    while left:
        for one in get_args(left.pop()):
            yield one
            left.append(one)


_EVENTS = list(_events())


def _class(name: str, kind: type) -> Iterator[str]:
    yield from (f"## {name}", "")
    own_init = None if getattr(kind, "_is_protocol", False) else kind.__dict__.get("__init__")
    if inspect.isfunction(own_init):
        yield from _code(signature(name, own_init).replace("def ", "", 1).removesuffix(" -> None"))
    if about := text_of(kind):
        yield from (about, "")
    if inspect.isfunction(own_init) and own_init.__doc__:
        yield from (text_of(own_init), "")
    if issubclass(kind, msgspec.Struct):
        yield from _fields(kind)
    for method, thing in inspect.getmembers(kind):
        if method.startswith("_") or _inherited_from_elsewhere(kind, method):
            continue
        if isinstance(thing, property):
            yield from (f"### {name}.{method}", "", text_of(thing), "")
        elif inspect.isfunction(thing):
            yield from (f"### {name}.{method}", "", *_code(signature(method, thing)), text_of(thing), "")


def _inherited_from_elsewhere(kind: type, member: str) -> bool:
    """Whether a base that is not ours brings it: what `msgspec.Struct` or `Exception` has needs no words here."""
    owner = next((base for base in kind.__mro__ if member in base.__dict__), kind)
    return not owner.__module__.startswith("tokenbus")


def _fields(kind: type[msgspec.Struct]) -> Iterator[str]:
    docs = field_docs(kind)
    yield from ("| field | type | default | what |", "|---|---|---|---|")
    annotations = {
        name: text for base in reversed(kind.__mro__) for name, text in inspect.get_annotations(base).items()
    }
    for field in msgspec.structs.fields(kind):
        default = "required" if field.required else f"`{_default(field)}`"
        told = cell(docs.get(field.name, ""))
        yield f"| `{field.name}` | `{cell(str(annotations.get(field.name, '')))}` | {default} | {told} |"
    yield ""


def _default(field: msgspec.structs.FieldInfo) -> str:
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    written = repr(value)
    return cell(f"{type(value).__name__}()" if " at 0x" in written else written)  # an address changes with each build


def _code(text: str) -> list[str]:
    return ["```python", text, "```", ""]
