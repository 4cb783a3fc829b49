"""What is shared and cannot be taken: in a round whose faults only take something, no worker ends, no provider is
blamed, and runs wait for nobody; and a full server gets room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from tests.chaos.judging.remains import SERVER_AWAY
from tests.chaos.record import Record, Violation

TAKERS = ("a request of ", "tool calls that may hold the lock")
"""What takes something from everybody. It must delay no other run."""
STANDING = ("SIGSTOP of a ", "SIGSTOP of every ", "each round trip to the server takes seconds", "the server is full")
"""What lets workers or the server stand for a time. It must end no worker, and no provider is to blame for it."""
DELAY_S = 30.0
"""A run takes at most this much longer than undisturbed, while somebody takes what is shared."""
CALL_S = 20.0
"""And this much for each of its own calls that kept its interpreter's lock, which is the timeout of a call."""
PROVIDER_PASS_S = 0.5
"""If a pass of the providers' event loop took this long, a provider may really have been silent: a piece of an answer
takes up to five passes through the provider and its proxy, and four seconds of silence are too many.
"""
BLAME = {"first_event_timeout", "idle_timeout", "no_progress", "call_timeout", "connect_timeout"}
"""Errors that say that a provider was silent."""


def judge(record: Record) -> Iterator[Violation]:
    """Check what the round's faults allow to be checked."""
    for problem in record.without_room:
        yield Violation("room", "", problem)
    if not record.faults or record.lossy:
        return
    if _only(record, (*TAKERS, *STANDING)):
        for end in record.exits:
            if end.requested is None and (end.ready or end.status != SERVER_AWAY):
                yield Violation(
                    "workers", "", f"{end.log}: it ended by itself, with {end.status}, though it only stood"
                )
        if not stood(record):
            yield from _blamed(record)
    if _only(record, TAKERS):
        held = Counter(line.run for line in record.holders)
        for run, seconds in record.delays.items():
            if seconds > DELAY_S + CALL_S * held[run]:
                yield Violation(
                    "delayed", run, f"took {seconds:g} s more than undisturbed, with {held[run]} such calls"
                )


def stood(record: Record) -> bool:
    """Whether the providers themselves may have been silent, because this machine is too busy."""
    return record.provider_stood_s >= PROVIDER_PASS_S


def _only(record: Record, faults: Sequence[str]) -> bool:
    return all(fault.startswith(tuple(faults)) for fault in record.faults)


def _blamed(record: Record) -> Iterator[Violation]:
    """Providers that are said to have been silent, though the worker stood."""
    for story in record.stories:
        if story.fate != "plain":
            continue
        for entry in record.logs.get(story.run, ()):
            code = (entry.event.get("error") or {}).get("code")
            if code in BLAME:
                yield Violation("blame", story.run, f"{entry.event['type']} with {code}, though its provider answered")
