"""Notices: what the webhooks worker reads from `notices`, and what a receiver gets as JSON."""

from __future__ import annotations

from datetime import UTC, datetime
from hashlib import sha256

import msgspec

MOST_FIELD_BYTES = 16 * 1024
"""Larger metadata of a run, and arguments of a call that waits, are left out of a notice."""


class Notice(msgspec.Struct, frozen=True, array_like=True):
    """A run ended, or waits for somebody, and these receivers are told."""

    receivers: tuple[str, ...]
    type: str
    """``run.`` and the type of the event."""
    seq: int
    """Of the event."""
    data: dict[str, object]
    """The event's fields without `provider_extra`; with the run's tenant, session and metadata, if it has them."""

    def delivery_id(self, run: str, receiver: str) -> str:
        """The same for every try, and for nothing else, so that a receiver can count once."""
        return "msg_" + sha256(f"{run}\n{self.seq}\n{receiver}".encode()).hexdigest()[:32]

    def body(self, at_ms: int) -> bytes:
        """What is posted: ``type``, ``timestamp`` and ``data``, as Standard Webhooks recommends."""
        at = datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        return msgspec.json.encode({"type": self.type, "timestamp": at, "data": self.data})


encode_notice = msgspec.msgpack.Encoder().encode
decode_notice = msgspec.msgpack.Decoder(Notice).decode
