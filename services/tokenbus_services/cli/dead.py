"""`tokenbus dead`: shows, retries and drops dead letters."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from tokenbus.bus.dead_letters import (
    StoredDeadLetter,
    all_dead_letters,
    drop_dead_letter,
    find_dead_letter,
    give_back,
    newest_dead_letters,
)
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server, translated
from tokenbus.bus.server.stream_reader import id_key
from tokenbus.client.retry_dead_letter import retry_dead_letter
from tokenbus.errors import CannotRetry, SettingsError
from tokenbus_services.cli import connect as reaching
from tokenbus_services.cli import exit_codes as ending
from tokenbus_services.cli.audit import noted
from tokenbus_services.cli.render import output
from tokenbus_services.cli.render.event_text import moment

IN_A_LINE = 80
"""Maximum characters of a reason in a list."""


async def listing(*, most: int, as_json: bool) -> None:
    """Show the newest dead letters."""
    async with _reached() as (server, keys):
        found = [dead async for dead in newest_dead_letters(server, keys, most=most)]
    if as_json:
        for dead in found:
            output.print_json({**_facts(dead), "size": _size(dead)})
    elif not found:
        print("no dead entries", file=sys.stderr)
    elif console := output.console():
        console.print(_table(found))
    else:
        for dead in found:
            e = dead.entry
            words = (dead.id, e.stage, e.run or "-", f"{_size(dead)} B", _one_line(e.reason))
            print(output.safe("  ".join(words)))


async def show(entry_id: str, *, as_json: bool, raw: bool) -> None:
    """Show one dead letter completely; with ``raw`` write only its bytes, unchanged. Raises DeadNotFound."""
    if raw and sys.stdout.isatty():
        raise SettingsError(
            "options", "--raw", "not to a terminal, which may execute control sequences; use a file or a pipe"
        )
    async with _reached() as (server, keys):
        dead = await find_dead_letter(server, keys, entry_id)
    if raw:
        output.write(dead.entry.bytes)
    elif as_json:
        output.print_json({"id": dead.id, **msgspec.to_builtins(dead.entry)})
    else:
        print(output.safe("\n".join(_whole(dead))))


async def retry(entry_ids: Sequence[str], *, as_json: bool) -> int:
    """Retry the requests behind these entries, or behind all if none is named, and remove the entries. The event of a
    group of subscribers is given back to it.

    Returns the exit code: 1 if an entry had to stay.
    """
    kept = 0
    async with _reached() as (server, keys), reaching.client() as bus:
        async for dead in _chosen(server, keys, entry_ids):
            try:
                if dead.entry.group:
                    group = await give_back(server, keys, dead)
                    words, facts = f"given back to the group {group}", {"group": group}
                else:
                    run = await retry_dead_letter(bus, server, keys, dead)
                    words, facts = f"sent again as run {run.id}", {"run": run.id}
            except CannotRetry as e:
                kept += 1
                _print_outcome(dead, as_json, f"stays: {e.problem}", problem=e.problem)
                continue
            # Delete only now: after a crash in between, the request is sent again under the same id, which is the same
            # run.
            await drop_dead_letter(server, keys, [dead.id])
            await noted(server, keys, "dead.retry", entry=dead.id, **facts)
            _print_outcome(dead, as_json, words, **facts)
    return ending.OTHER if kept else 0


async def count() -> int:
    """Return the number of entries."""
    async with _reached() as (server, keys):
        return await server.client.xlen(keys.dead)


async def drop(entry_ids: Sequence[str], *, as_json: bool) -> None:
    """Delete these entries, or all if none is named. Raises DeadNotFound for the first that does not exist."""
    async with _reached() as (server, keys):
        async for dead in _chosen(server, keys, entry_ids):
            await drop_dead_letter(server, keys, [dead.id])
            await noted(server, keys, "dead.drop", entry=dead.id, run=dead.entry.run)
            _print_outcome(dead, as_json, "dropped")


@asynccontextmanager
async def _reached() -> AsyncGenerator[tuple[Server, Keys]]:
    """Connect to the server and the deployment; translates redis-py's errors."""
    async with reaching.deployment() as (_, server, keys):
        with translated(server, keys.dead):
            yield server, keys


async def _chosen(server: Server, keys: Keys, entry_ids: Sequence[str]) -> AsyncIterator[StoredDeadLetter]:
    if not entry_ids:
        async for dead in all_dead_letters(server, keys):
            yield dead
    for entry_id in sorted(set(entry_ids), key=id_key):
        yield await find_dead_letter(server, keys, entry_id)


def _size(dead: StoredDeadLetter) -> int:
    return dead.entry.size or len(dead.entry.bytes)


def _facts(dead: StoredDeadLetter) -> dict[str, Any]:
    facts = msgspec.to_builtins(dead.entry)
    del facts["bytes"]
    return {"id": dead.id, **facts}


def _print_outcome(dead: StoredDeadLetter, as_json: bool, words: str, **facts: str) -> None:
    if as_json:
        output.print_json({"id": dead.id, **facts})
    else:
        print(output.safe(f"{dead.id} {words}"), flush=True)


def _whole(dead: StoredDeadLetter) -> Iterable[str]:
    e = dead.entry
    yield f"entry   {dead.id}"
    yield f"buried  {moment(dead.id)}"
    yield f"reason  {e.reason}"
    yield f"stage   {e.stage}"
    yield f"stream  {e.stream}"
    yield f"origin  {e.entry}"
    yield f"run     {e.run or '-'}"
    if e.seq is not None:
        yield f"seq     {e.seq}"
    cut = f", of which the first {len(e.bytes)} are kept" if e.size else ""
    kind, text = readable(e.bytes)
    yield f"bytes   {_size(dead)}{cut}, {kind}"
    yield ""
    yield text


def _table(found: Sequence[StoredDeadLetter]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table("entry", "buried", "stage", "run", "bytes", "reason", box=SIMPLE_HEAD)
    for dead in found:
        e = dead.entry
        words = (dead.id, moment(dead.id), e.stage, e.run or "-", str(_size(dead)), _one_line(e.reason))
        table.add_row(*(Text(output.safe(word)) for word in words))
    return table


def _one_line(reason: str) -> str:
    line = " ".join(reason.split())
    return line if len(line) <= IN_A_LINE else line[: IN_A_LINE - 1] + "…"


MOST_DUMPED = 4096
"""Maximum bytes in a dump; the raw bytes can go to a file."""
_A_LINE = 16


def readable(data: bytes) -> tuple[str, str]:
    """Return the format of the bytes and their text. May contain control characters: escape it before printing."""
    if not data:
        return "empty", ""
    for kind, decode in (("JSON", msgspec.json.decode), ("msgpack", msgspec.msgpack.decode)):
        try:
            value: Any = decode(data)
            if isinstance(value, (dict, list)):  # in msgpack nearly any byte is a number
                return kind, msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
        except (msgspec.MsgspecError, TypeError, ValueError, RecursionError):
            continue
    try:
        return "text", data.decode()
    except UnicodeDecodeError:
        return "binary", "\n".join(_dump(data))


def _dump(data: bytes) -> Iterator[str]:
    """Yield lines of offset, hexadecimal and ASCII, like hexdump."""
    for at in range(0, min(len(data), MOST_DUMPED), _A_LINE):
        line = data[at : at + _A_LINE]
        text = "".join(chr(b) if 0x20 <= b < 0x7F else "." for b in line)
        yield f"{at:08x}  {line.hex(' '):<{3 * _A_LINE}} {text}"
    if len(data) > MOST_DUMPED:
        yield f"… {len(data) - MOST_DUMPED} bytes more; --raw gives all of them"
