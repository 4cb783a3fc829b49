"""Which names a conversation in prefill mode is written without, where the rule is code: it becomes data here, for a
request travels, and code does not."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tokenbus.events.requests import Generate, Message


def unnamed_where(request: Generate, leaves_out: Callable[[Message], bool]) -> Generate:
    """The request with an empty name in each message for which ``leaves_out`` is true: an empty name is left out.

    A participant whose every message has an empty name gives no stop string.
    """
    messages = [
        msgspec.structs.replace(message, participant="") if leaves_out(message) else message
        for message in request.messages
    ]
    return msgspec.structs.replace(request, messages=messages)
