"""The errors: those that Python code meets, from the tree in `tokenbus.errors`, and those that a run ends with."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

from maintenance.docsite.reference.docstrings import cell, text_of
from maintenance.docsite.reference.run_codes import CLASSES, CODES
from tokenbus import errors
from tokenbus.events.error_info import RETRYABLE

HEAD = """\
# Errors

Find out what an error means, and whether to try again.

```python
from tokenbus import Client
from tokenbus.errors import RunFailed, TokenbusError

async def answer(bus: Client, request: dict[str, object]) -> str:
    try:
        return (await (await bus.publish(request)).result()).text
    except RunFailed as e:
        return f"the run failed with {e.error.code} ({e.error.kind}); try again: {e.retryable}"
    except TokenbusError as e:
        return f"{e.code}; try again: {e.retryable}"
```

- `code` is stable: programs may compare it. The message is for people and may change.
- `retryable` says whether the same call may succeed later without any change.
- All errors are in `tokenbus.errors`, and derive from `TokenbusError`. Fields are typed attributes.
"""
RUNS = """\
## What a run ends with

`failed` and `incomplete` events carry an [error object](events.md#an-error). Its family is `error.class` in JSON, in
Python `error.kind`, because `class` is a keyword. `RunFailed.error` is this object.

| class | may pass by itself | what |
|---|---|---|
"""
CODES_HEAD = """\

A provider's own error keeps the provider's code (`rate_limit_error`, `invalid_api_key`, …); one without a code has
`http_<status>`. The bus adds these:

| code | class | retryable | when |
|---|---|---|---|
"""


def page() -> str:
    rows = "".join(f"| `{name}` | {_yes(name in RETRYABLE)} | {what} |\n" for name, what in CLASSES.items())
    codes = "".join(
        f"| `{code}` | `{told.kind}` | {_yes(told.retryable)} | {told.when} |\n" for code, told in sorted(CODES.items())
    )
    return HEAD + "\n" + "\n".join(_tree()) + "\n\n" + RUNS + rows + CODES_HEAD + codes


def _tree() -> Iterator[str]:
    yield "## In Python"
    yield ""
    yield "| error | code | retryable | fields | when |"
    yield "|---|---|---|---|---|"
    yield from _below(errors.TokenbusError, 0)


def _below(kind: type[errors.TokenbusError], depth: int) -> Iterator[str]:
    if kind.__module__ == errors.__name__:
        name = "&nbsp;&nbsp;" * depth + f"`{kind.__name__}`"
        fields = ", ".join(f"`{field}`" for field in _fields(kind))
        retryable = "as its error says" if _decided_by_the_run(kind) else _yes(kind.retryable)
        yield f"| {name} | `{kind.code}` | {retryable} | {fields} | {cell(text_of(kind))} |"
    for child in sorted(kind.__subclasses__(), key=_place):
        yield from _below(child, depth + 1)


def _place(kind: type[errors.TokenbusError]) -> int:
    """Where the tree in the docstring of `tokenbus.errors` has it; an error of another module comes last."""
    tree = errors.__doc__ or ""
    found = re.search(rf"── {kind.__name__}\b", tree)
    return found.start() if found else len(tree)


def _decided_by_the_run(kind: type[errors.TokenbusError]) -> bool:
    return issubclass(kind, errors.RunFailed | errors.RunIncomplete)


def _fields(kind: type[errors.TokenbusError]) -> list[str]:
    """What an error of this kind has: annotated attributes, and what its constructor sets."""
    found: dict[str, None] = {}
    for base in reversed(kind.__mro__):
        if not issubclass(base, errors.TokenbusError):
            continue
        found |= dict.fromkeys(name for name in inspect.get_annotations(base) if name not in _EVERYWHERE)
        init = base.__dict__.get("__init__")
        source = inspect.getsource(init) if init else ""
        names = init.__code__.co_names if init else ()
        found |= dict.fromkeys(name for name in names if f"self.{name} = " in source and name not in _EVERYWHERE)
    return list(found)


_EVERYWHERE = ("code", "retryable")


def _yes(value: bool) -> str:
    return "yes" if value else "no"
