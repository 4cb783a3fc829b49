"""Builds that are broken on purpose: each removes one guarantee, and the judge must detect it.

They exist only here: a worker changes its own copy of the product before it starts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tokenbus.bus import leases, process_clock
from tokenbus.bus.scripts import sessions
from tokenbus.bus.scripts.script import LuaScript, ScriptCall, declared
from tokenbus.bus.server.server import Server
from tokenbus.bus.stage.partition import Partition
from tokenbus.core.run.gate import PolicyGate
from tokenbus.events.child_runs import parent_call
from tokenbus.events.frames import PolicyVerdict
from tokenbus_services.parser.effect_writer import EffectWriter
from tokenbus_services.parser.room import RoomKeeper
from tokenbus_services.runtime.queue_work import InFlight

APPEND = f"{sessions.__name__.rpartition('.')[2]}.{sessions.append.__name__}"
"""The script that puts something into a session."""
AHEAD = f"{2**62}-0"
"""An offset behind which no server has fallen back."""


def unfenced(text: str) -> str:
    """The script of a commit without its checks of the sender and of earlier commits."""
    begin, owing = text.index("if h[1] ~= token"), text.index("local owing = ")
    check, end = text.index("if owing ~= owed"), text.index("local alien, wrong")
    return text[:begin] + text[owing:check] + text[end:]


def _without_fence() -> None:
    """A commit is written regardless of its sender and of earlier commits. A worker that was stopped for longer than
    its lease does not notice: else it commits only if a batch is ready before its next renewal.
    """
    text = unfenced(declared["commit"].script.text)
    declared["commit"].script = LuaScript("commit", lambda: text)
    run_each = leases.run_each

    async def never_lost(server: Server, calls: Sequence[ScriptCall]) -> list[Any]:
        replies = await run_each(server, calls)
        renews = [call.script.name == "leases.renew" for call in calls]
        return [reply or AHEAD.encode() if renew else reply for reply, renew in zip(replies, renews, strict=True)]

    leases.run_each = never_lost


def _acknowledging_early() -> None:
    """A queue's item is acknowledged before its work is done."""
    in_flight: Any = InFlight
    begin_work = in_flight._begin

    async def begin(self: Any, work: Any) -> None:
        await self._queue.finish([work.item])
        await begin_work(self, work)

    in_flight._begin = begin


def _with_the_watermark_too_far() -> None:
    """The low watermark follows the offset, although open runs began before it."""
    Partition.watermark = property(lambda self: self.offset)  # pyright: ignore[reportAttributeAccessIssue]


def _counting_every_ruling() -> None:
    """A policy worker's verdict on a draft counts although another worker has already judged it."""
    first = PolicyGate.mark_applied

    def fresh(self: PolicyGate, step: PolicyVerdict) -> bool:
        return first(self, step) or (not step.part and step.draft < self.judged_count)

    PolicyGate.mark_applied = fresh


def _counting_stands() -> None:
    """Time in which a worker was stopped counts as time in which its tasks made no progress."""
    process_clock.STOOD_S = math.inf


def _without_room() -> None:
    """A full server gets no room."""

    async def look(self: RoomKeeper) -> None:
        pass

    RoomKeeper.look = look


def _with_ends_out_of_order() -> None:
    """The commit that ends a child run gives its events no place in the tree."""
    write = EffectWriter.order_in_tree

    def order(self: EffectWriter, machine: Any, events: Any, commit: Any) -> None:
        if machine.over and parent_call(machine.state.run):
            return
        write(self, machine, events, commit)

    EffectWriter.order_in_tree = order


def _scripted(name: str, old: str, new: str) -> None:
    """Change the text of a script."""
    before = declared[name].script.text
    after = before.replace(old, new)
    assert after != before, f"{name} has no {old!r}"
    declared[name].script = LuaScript(name, lambda: after)


def _accepting_appends_twice() -> None:
    """An append that is sent again is accepted again."""
    _scripted(APPEND, "if redis.call('HEXISTS', appends, append) == 1 then return 'known' end", "")


def _steering_with_what_waits_on() -> None:
    """A message that steered a turn waits on, and is delivered again."""
    text = declared["commit"].script.text
    begin = text.index("redis.call('ZREM', s.queue, append)", text.index("function steer_session_run"))
    _scripted("commit", text[begin : text.index("all[#all + 1]", begin)], "")


def _placing_too_early() -> None:
    """What is put into a session is told before events of the run that readers have got."""
    _scripted(APPEND, "local newest = newest_of(run_log)", "local newest = math.max(-1, newest_of(run_log) - 2)")


BUILDS = {
    "fence": _without_fence,
    "early-ack": _acknowledging_early,
    "watermark": _with_the_watermark_too_far,
    "rulings": _counting_every_ruling,
    "impatient": _counting_stands,
    "no-room": _without_room,
    "tree": _with_ends_out_of_order,
    "appends-twice": _accepting_appends_twice,
    "steers-twice": _steering_with_what_waits_on,
    "places": _placing_too_early,
}
"""Keyed by the name that `make chaos BROKEN=…` takes."""
