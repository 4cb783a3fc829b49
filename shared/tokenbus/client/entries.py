"""Public entries of streams as events."""

from __future__ import annotations

import msgspec

from tokenbus.bus.reader import Entry
from tokenbus.errors import Malformed
from tokenbus.events.public import PublicEvent, decode


def public_event(stream: str, entry: Entry) -> PublicEvent:
    """The event that an entry of a log or a public topic holds. Raises Malformed, naming stream and entry."""
    entry_id, fields = entry
    try:
        return decode(fields[b"__data__"])
    except (KeyError, msgspec.DecodeError, UnicodeDecodeError) as e:
        raise Malformed(f"{stream} {entry_id.decode()}", f"no public event: {e!r}") from None
