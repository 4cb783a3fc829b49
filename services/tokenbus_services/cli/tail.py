"""`tokenbus tail`: shows a topic's events of all runs until Ctrl-C."""

from __future__ import annotations

from tokenbus.bus.keys import SubscribedTopic
from tokenbus.errors import SettingsError
from tokenbus_services.cli import connect as reaching
from tokenbus_services.cli.render.output import showing


async def tail(topic: SubscribedTopic, *, group: str | None, as_json: bool) -> None:
    """Show new events; with a group, only those that its other workers do not get."""
    async with reaching.client() as bus:
        try:
            subscription = bus.subscribe(topic, group=group) if group else bus.subscribe(topic)
        except ValueError as e:
            raise SettingsError("options", "--group", str(e)) from None
        async with subscription as events:
            with showing(as_json=as_json, many_runs=True) as show:
                async for event in events:
                    show(event)
