"""Scripts that read parts of a stream's entry, because the whole is too large or too broken to be sent."""

from __future__ import annotations

from tokenbus.bus.scripts.script import ScriptCall, script

_NAME_BYTES = 1024
MAX_STEPS = 20_000
"""Limit of the server's search for a request's id: some milliseconds."""
SEARCHED_BYTES = 2**19
"""How much of a request is searched."""
READ_BYTES = 2**20
"""The ids of no further entries are read after so many bytes of them: the server copies each."""


@script(NAME_BYTES=_NAME_BYTES)
def field_sizes(stream: str, *, entry: str) -> ScriptCall:
    """Read the names of the entry's fields and the sizes of their values in bytes, alternating."""
    ...


@script()
def value(stream: str, *, entry: str | bytes, place: int) -> ScriptCall:
    """Read one value of the entry; ``place`` counts names and values from 1."""
    ...


@script(NAME_BYTES=_NAME_BYTES, MAX_STEPS=MAX_STEPS, SEARCHED_BYTES=SEARCHED_BYTES)
def find_request(stream: str, *, entry: str) -> ScriptCall:
    """Find type and id at the top level of a request in JSON, with or without FastStream's binary header; empty if
    there is none.
    """
    ...


@script(READ_BYTES=READ_BYTES)
def ids(stream: str, *, after: str, last: str, count: int) -> ScriptCall:
    """Read the ids of up to ``count`` entries after ``after`` and up to ``last``; of fewer, if they are large."""
    ...
