"""Dead-letters an item whose handler raised, and fails its runs."""

from __future__ import annotations

from tokenbus.bus.dead_letters import DeadLetter, dead_letter
from tokenbus.bus.server.retry import retry_until_available
from tokenbus.bus.server.server import Server
from tokenbus.bus.work_queue import QueueItem
from tokenbus.errors.base import public_reason
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import CONTROL_ATTEMPT, EventFrame, encode
from tokenbus.events.normalized import Failed
from tokenbus_services.settings import Settings


async def dead_letter_item(server: Server, settings: Settings, stage: str, item: QueueItem, error: Exception) -> None:
    """Move a poison item to the dead-letter stream and end its run as `failed`."""
    keys = settings.keys
    reason = f"{type(error).__name__}: {error}"
    for name, data in item.fields.items():
        run = name.decode(errors="replace")
        dead = DeadLetter(reason=reason, stage=stage, stream=item.stream, entry=item.entry_id, bytes=data, run=run)
        await dead_letter(server, keys, dead, most=settings.retention.dead_entries)
        told = public_reason(error, "the work failed")
        problem = ErrorInfo(code="poison", kind="internal", message=told, where=f"{stage} {item.entry_id}")
        frame = encode(EventFrame(0, CONTROL_ATTEMPT, server.clock.now_ms(), [Failed(problem)]))
        events = keys.topic(keys.partition_of(run), "events")
        await retry_until_available(
            server,
            lambda run=run, frame=frame, events=events: server.client.xadd(events, {run: frame}),
            what=f"end of a run poisoned in {stage}",
        )
