"""Replays a record's raw stream through decoder and parser, and compares the result. Pure."""

from __future__ import annotations

from base64 import b64decode
from collections import defaultdict, deque
from collections.abc import Iterable
from difflib import unified_diff

import msgspec

from tokenbus.blobs import blob_id_of
from tokenbus.core.attempt_decoder import AttemptReader
from tokenbus.core.image_header import in_blob
from tokenbus.core.run.gated_run import GatedRun, accept
from tokenbus.core.run.state_machine import RunMachine
from tokenbus.errors import Malformed
from tokenbus.events.frames import CONTROL_ATTEMPT, Accepted, BusEvent, EventFrame, RawFrame, TapedFrame
from tokenbus.events.normalized import Image
from tokenbus.events.public import Chunk, PublicEvent, RunEnd, encode
from tokenbus_services.recorder.record import Record


def replay(record: Record) -> list[PublicEvent]:
    """Compute the run's public events again from its raw stream.

    The parser applies the tape in order: external events as recorded, and for an attempt the same number of events as
    originally, decoded from the raw stream, or fewer if it has fewer. Raises Malformed.
    """
    decoded = _normalized(record.raw_frames())
    taken = record.taken()
    machine = _begun(record.run, taken)
    events: list[PublicEvent] = []
    for piece in taken:
        frame = piece.frame
        if frame.attempt != CONTROL_ATTEMPT:
            waiting = decoded[frame.attempt]
            of_attempt = [waiting.popleft() for _ in range(min(piece.events, len(waiting)))]
            frame = EventFrame(frame.turn, frame.attempt, frame.at_ms, of_attempt)
        machine.handle(frame)
        machine.effects.clear()
        events += machine.out.number(record.run, len(events))
    return events


def differences(recorded: Iterable[PublicEvent], replayed: Iterable[PublicEvent]) -> list[str]:
    """The differences as lines of a unified diff; empty if there are none.

    Chunk boundaries depend on which frames shared a commit, and times are not content. So both are ignored, and with
    them the event numbers.
    """
    diff = unified_diff(_lines(recorded), _lines(replayed), "recorded", "replayed", lineterm="", n=1)
    return list(diff)


def _begun(run: str, taken: list[TapedFrame]) -> RunMachine | GatedRun:
    """The parser's state machine after the run's acceptance, which must be first on the tape."""
    match taken[:1]:
        case [TapedFrame(EventFrame(events=[Accepted() as accepted, *_]) as frame)]:
            return accept(run, accepted, frame.at_ms)
        case _:
            raise Malformed(f"record of {run}", "its tape does not begin with the run's acceptance")


def _normalized(frames: list[RawFrame]) -> defaultdict[int, deque[BusEvent]]:
    """The normalizer's output of each attempt."""
    readers: dict[int, AttemptReader] = {}
    decoded: defaultdict[int, deque[BusEvent]] = defaultdict(deque)
    for frame in frames:
        reader = readers.setdefault(frame.attempt, AttemptReader(frame.attempt))
        events = reader.read(frame)
        if not reader.images.inline:
            events = [_in_blob(event) if isinstance(event, Image) else event for event in events]
        decoded[frame.attempt].extend(events)
    return decoded


def _in_blob(image: Image) -> Image:
    """The event that the normalizer emits once the image is in the blob store."""
    try:
        content = b64decode(image.base64, validate=True)
    except ValueError:  # binascii.Error, or ValueError for non-ASCII text
        return image
    return in_blob(image, content, blob_id_of(content))


def _lines(events: Iterable[PublicEvent]) -> list[str]:
    """One event per line as JSON, without ignored fields, with adjacent chunks merged."""
    lines: list[dict[str, object]] = []
    for event in events:
        plain: dict[str, object] = msgspec.json.decode(encode(event))
        del plain["seq"]
        if isinstance(event, RunEnd):
            plain.pop("timing", None)
        if isinstance(event, Chunk) and lines and {**lines[-1], "text": ""} == {**plain, "text": ""}:
            lines[-1]["text"] = f"{lines[-1]['text']}{event.text}"
        else:
            lines.append(plain)
    return [msgspec.json.encode(line).decode() for line in lines]
