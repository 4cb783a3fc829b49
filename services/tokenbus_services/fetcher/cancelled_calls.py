"""A cancel becomes a closed socket: the calls of attempts that are over are stopped.

`control` names a run that was cancelled, or an attempt that the parser closed, to every worker. The one that makes its
call cancels the call's task (`InFlight`). The connection closes on the way out of `provider_call.fetch`, so the
provider stops generating.
"""

from __future__ import annotations

from math import inf

import msgspec

from tokenbus.bus.work_queue import QueueItem
from tokenbus.events.frames import Control, turn_decoder
from tokenbus_services.runtime.in_flight import InFlight


def stop_calls(attempts: InFlight, message: Control) -> None:
    """Stop the calls of this worker that the message ends."""
    if message.what == "cancel":
        attempts.cancel(message.run)
    elif message.what == "closed":
        attempts.cancel(message.run, which=lambda item: _attempt_of(item, message.run) <= message.attempt)


def _attempt_of(item: QueueItem, run: str) -> float:
    try:
        return turn_decoder.decode(item.fields[run.encode()]).attempt
    except msgspec.MsgspecError:
        return inf  # its work will report what is wrong with it
