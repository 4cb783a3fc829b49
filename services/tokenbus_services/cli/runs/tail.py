"""`tokenbus tail`: shows a topic's events of all runs until Ctrl-C."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from tokenbus.bus.keys import SubscribedTopic
from tokenbus.errors import SettingsError
from tokenbus_services.cli import connect as reaching
from tokenbus_services.cli.render.output import showing


async def tail(
    topic: SubscribedTopic,
    *,
    group: str | None,
    begin: Literal["now", "start"],
    runs: Sequence[str],
    kinds: Sequence[str],
    as_json: bool,
) -> None:
    """Show events; with a group, only those that its other workers do not get. ``runs``, ``kinds``: only these, if any
    are named.
    """
    async with reaching.client() as bus:
        subscribe: Any = bus.subscribe  # its overloads are by literal topics
        try:
            subscription = subscribe(topic, group=group, from_=begin, runs=set(runs) or None, kinds=set(kinds) or None)
        except ValueError as e:
            where = "--kind" if str(e).startswith("kinds") else "--group"
            raise SettingsError("options", where, str(e)) from None
        async with subscription as events:
            with showing(as_json=as_json, many_runs=True) as show:
                async for event in events:
                    show(event)
