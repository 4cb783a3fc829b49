"""Chooses by code which names to leave out of a prefill-mode conversation. Code cannot travel with a request, so the
choice is stored in the messages.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tokenbus.events.requests import Generate, Message


def unnamed_where(request: Generate, leaves_out: Callable[[Message], bool]) -> Generate:
    """Return the request with an empty name on every message for which ``leaves_out`` returns True.

    In prefill mode such a message is written without a name.

    A participant whose messages all have an empty name adds no stop string.
    """
    messages = [
        msgspec.structs.replace(message, participant="") if leaves_out(message) else message
        for message in request.messages
    ]
    return msgspec.structs.replace(request, messages=messages)
