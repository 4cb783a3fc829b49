"""Decisions on what a run waits for: guarded writes to its events, of which each wait gets one."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenbus.bus.keys import Keys
from tokenbus.bus.run_record import call_field
from tokenbus.bus.scripts.runs.index import MOST_FORGOTTEN
from tokenbus.bus.scripts.script import ScriptCall, script
from tokenbus.events.frames import CONTROL_ATTEMPT, EventFrame, WaitDecided, encode
from tokenbus.events.waits import WaitFate

REPLY_MS = 600_000
"""How long the sender of a decision can read what became of it."""


@script(MOST_FORGOTTEN=MOST_FORGOTTEN)
def decide(
    run_key: str,
    events: str,
    parser_lease: str,
    reply: str,
    indexes: Sequence[str],
    *,
    run: str,
    wait: str,
    call: str = "",
    frame: bytes,
    fate: bytes,
    reply_ms: int = REPLY_MS,
) -> ScriptCall:
    """Decide a wait with the event ``frame``, if it is open and the run is. ``reply``: where the sender looks for what
    became of it; the run's hash again: nobody does. ``indexes``: of waits, of all and of the tenant. ``call``: the
    field of a call that waits in its worker. Without a ``frame`` it only tells what was decided.

    Reply: a `DecisionReply` as JSON. Its ``fate`` is that of the first decision; there is none for a wait that the run
    does not have, or that ended with the run.
    """
    ...


@script()
def refuse(reply: str, *, answer: bytes, reply_ms: int = REPLY_MS) -> ScriptCall:
    """Tell the sender of a decision why it was refused: ``answer``, a `DecisionReply` as JSON."""
    ...


@script()
def confirm(reply: str, *, reply_ms: int = REPLY_MS) -> ScriptCall:
    """Keep a reply for as long again: a write, after which its reader can wait until all before it is replicated.

    Reply: 1; 0 if the server does not have it, or not any more.
    """
    ...


def decision(
    keys: Keys,
    run: str,
    tenant: str,
    event: WaitDecided,
    *,
    at_ms: int,
    durable: bool,
    held: bool = False,
    replies: bool = True,
) -> ScriptCall:
    """The call that decides a wait of a run of this tenant. ``durable``: as the run is. ``held``: the wait ends with
    its call. ``replies``: the sender looks for what became of it.
    """
    fate = WaitFate(
        wait=event.wait,
        id=event.id,
        decision=event.decision,
        by=event.by,
        door=event.door,
        at_ms=at_ms,
        durable=durable,
    )
    return decide(
        *_places(keys, run, tenant, event.id if replies else ""),
        run=run,
        wait=event.wait,
        call=call_field(int(event.wait.partition(".")[0])) if held else "",
        frame=encode(EventFrame(0, CONTROL_ATTEMPT, at_ms, [event])),
        fate=msgspec.json.encode(fate),
    )


def look_up(keys: Keys, run: str, wait: str, decision_id: str) -> ScriptCall:
    """The call that tells the sender of a decision what was decided before, and decides nothing."""
    return decide(*_places(keys, run, "", decision_id), run=run, wait=wait, frame=b"", fate=b"")


def _places(keys: Keys, run: str, tenant: str, decision_id: str) -> tuple[str, str, str, str, tuple[str, ...]]:
    partition = keys.partition_of(run)
    return (
        keys.run(run),
        keys.topic(partition, "events"),
        keys.lease(partition, "parser"),
        keys.decision(run, decision_id) if decision_id else keys.run(run),
        (keys.waiting(partition), *([keys.waiting(partition, tenant)] if tenant else [])),
    )
