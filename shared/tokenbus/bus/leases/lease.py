"""An owned partition."""

from __future__ import annotations

import msgspec


class Lease(msgspec.Struct, frozen=True):
    """An owned partition: the token that fences its writes, and the previous owner's offset and watermark."""

    partition: int
    token: str
    offset: str
    watermark: str
