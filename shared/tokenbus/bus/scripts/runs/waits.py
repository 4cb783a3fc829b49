"""Decisions on what a run waits for: guarded writes to its events, of which each wait gets one."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenbus.bus.keys import Keys
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
    frame: bytes,
    fate: bytes,
    reply_ms: int = REPLY_MS,
) -> ScriptCall:
    """Decide a wait with the event ``frame``, if it is open and the run is. ``reply``: where the sender looks for what
    became of it; the run's hash again: nobody does. ``indexes``: of waits, of all and of the tenant.

    Reply: a `DecisionReply` as JSON. Its ``fate`` is that of the first decision; there is none for a wait that the run
    does not have, or that ended with the run.
    """
    ...


@script()
def refuse(reply: str, *, answer: bytes, reply_ms: int = REPLY_MS) -> ScriptCall:
    """Tell the sender of a decision why it was refused: ``answer``, a `DecisionReply` as JSON."""
    ...


def decision(keys: Keys, run: str, tenant: str, event: WaitDecided, *, at_ms: int, replies: bool = True) -> ScriptCall:
    """The call that decides a wait of a run of this tenant. ``replies``: the sender looks for what became of it."""
    partition = keys.partition_of(run)
    fate = WaitFate(wait=event.wait, id=event.id, decision=event.decision, by=event.by, door=event.door, at_ms=at_ms)
    return decide(
        keys.run(run),
        keys.topic(partition, "events"),
        keys.lease(partition, "parser"),
        keys.decision(run, event.id) if replies else keys.run(run),
        (keys.waiting(partition), *([keys.waiting(partition, tenant)] if tenant else [])),
        run=run,
        wait=event.wait,
        frame=encode(EventFrame(0, CONTROL_ATTEMPT, at_ms, [event])),
        fate=msgspec.json.encode(fate),
    )
