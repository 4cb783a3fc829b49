"""`tokenbus records` and `tokenbus replay`: shows, exports and replays recorded runs."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from tokenbus.blobs import BlobLoader
from tokenbus.bus.keys import Keys
from tokenbus.bus.records import RecordEntry, find_record, newest_records
from tokenbus.bus.server.server import Server, translated
from tokenbus.errors import Malformed, SettingsError
from tokenbus.events.frames import Data, Ended, Lost, Opened, RawFrame
from tokenbus_services.blobs.client import loader_of
from tokenbus_services.cli import connect as reaching
from tokenbus_services.cli import exit_codes as ending
from tokenbus_services.cli.render import output
from tokenbus_services.cli.render.event_text import moment
from tokenbus_services.cli.render.output import showing
from tokenbus_services.recorder import record as records
from tokenbus_services.recorder.record import Record
from tokenbus_services.recorder.replay import differences, replay

TRUNCATED = "its raw stream is truncated: it was longer than records.raw_bytes"


async def listing(*, as_json: bool) -> None:
    """Show all records, newest first."""
    async with _reached() as (server, keys, _):
        with translated(server):
            some = False
            async for entry in newest_records(server, keys):
                some = True
                if as_json:
                    output.print_json(entry)
                else:
                    print(output.safe(_line(entry)))
    if not some and not as_json:
        print("no recorded runs; [records] in the settings turns recording on", file=sys.stderr)


def show(run: str, *, as_json: bool) -> None:
    """Show a record: its request, each attempt, and how it ended. Raises RecordNotFound."""
    record = asyncio.run(_fetched(run))
    if as_json:
        output.print_json(record)
    else:
        print(output.safe("\n".join(_whole(record))))


def export(run: str, file: Path) -> None:
    """Write a record to a file for `tokenbus replay`. Raises RecordNotFound, SettingsError."""
    record = asyncio.run(_fetched(run))
    try:
        file.write_bytes(msgspec.json.encode(record) + b"\n")
    except OSError as e:
        raise SettingsError("options", "FILE", f"{file}: {e.strerror or e}") from None
    print(f"{file}: {file.stat().st_size} B")


def replay_run(run: str, *, as_json: bool) -> int:
    """Replay a run's record. Raises RecordNotFound."""
    return play(asyncio.run(_fetched(run)), as_json=as_json)


def replay_file(file: Path, *, as_json: bool) -> int:
    """Replay an exported record, without a server. Raises SettingsError, Malformed."""
    try:
        value = msgspec.json.decode(file.read_bytes())
    except OSError as e:
        raise SettingsError("options", "--file", f"{file}: {e.strerror or e}") from None
    except msgspec.DecodeError as e:
        raise Malformed(str(file), str(e)) from None
    return play(records.from_builtins(value, str(file)), as_json=as_json)


def play(record: Record, *, as_json: bool) -> int:
    """Show the replayed events, and on stderr whether they equal the recorded ones. Returns the exit code: 1 if they
    differ.
    """
    replayed = replay(record)
    with showing(as_json=as_json) as present:
        for event in replayed:
            present(event)
    sys.stdout.flush()
    if record.truncated:
        print(f"run {record.run}: {TRUNCATED}", file=sys.stderr)
    found = differences(record.public_events(), replayed)
    if not found:
        print(f"run {record.run}: the replay equals the recorded result", file=sys.stderr)
        return 0
    print(f"run {record.run}: the replay differs from the recorded result", file=sys.stderr)
    print(output.safe("\n".join(found)), file=sys.stderr)
    return ending.OTHER


@asynccontextmanager
async def _reached() -> AsyncGenerator[tuple[Server, Keys, BlobLoader]]:
    async with reaching.deployment() as (settings, server, keys):
        blobs = loader_of(settings.blobs)
        try:
            yield server, keys, blobs
        finally:
            await blobs.aclose()


async def _fetched(run: str) -> Record:
    async with _reached() as (server, keys, blobs):
        with translated(server):
            entry = await find_record(server, keys, run)
        return await records.load(entry.blob_id, blobs)


def _line(entry: RecordEntry) -> str:
    words = [moment(str(entry.at_ms)), entry.run, entry.status, f"{entry.provider} {entry.model}"]
    words += [f"attempts {entry.attempts}", f"{entry.raw_bytes} B raw"]
    return "  ".join([*words, "truncated"] if entry.truncated else words)


def _whole(record: Record) -> Iterator[str]:
    end = record.events[-1] if record.events else {"type": "unknown"}
    yield f"run       {record.run}"
    yield f"accepted  {moment(str(record.accepted_ms))}"
    yield f"ended     {end['type']}"
    if record.truncated:
        yield f"note      {TRUNCATED}"
    yield f"request   {msgspec.json.encode(record.request).decode()}"
    for turn, messages in record.history.items():
        yield f"turn {turn}    adds {msgspec.json.encode(messages).decode()}"
    attempts: dict[int, list[RawFrame]] = {}
    for frame in record.raw_frames():
        attempts.setdefault(frame.attempt, []).append(frame)
    for attempt, frames in attempts.items():
        yield ""
        yield f"attempt {attempt} of turn {frames[0].turn}"
        yield from _attempt(frames)


def _attempt(frames: list[RawFrame]) -> Iterator[str]:
    """Yield what the provider sent, as text, and how the call ended."""
    body = b""
    for item in (item for frame in frames for item in frame.items):
        match item:
            case Opened():
                yield f"{item.api} answered {item.status}, stream: {str(item.stream).lower()}"
            case Data():
                body += item.data
            case Ended(error) if error:
                yield f"ended: {error.code}: {error.message}"
            case Lost():
                yield f"lost: {item.reason}"
            case _:
                pass
    yield from body.decode(errors="replace").splitlines()
