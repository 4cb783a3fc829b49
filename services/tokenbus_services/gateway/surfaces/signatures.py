"""Carries what a provider wants back with a block through clients that know one signature only. Pure.

The signature of the client's own protocol goes as it is, so a conversation may move between provider and gateway.
Anything else is packed with its origin: the bus then returns it to the provider that made it, and to no other.
"""

from __future__ import annotations

import binascii
from base64 import b64decode, b64encode
from collections.abc import Mapping

import msgspec

_MARK = b"tokenbus1."
_MAX_FIELDS = 16
_decode = msgspec.json.Decoder(dict[str, str])


def pack(opaque: Mapping[str, str]) -> str:
    """Return the values as base64 text, which every client hands back unchanged."""
    return b64encode(_MARK + msgspec.json.encode(dict(opaque))).decode()


def unpack(signature: str) -> dict[str, str] | None:
    """Return the packed values; None if the text was made by someone else."""
    try:
        data = b64decode(signature, altchars=b"-_" if "-" in signature or "_" in signature else None)
        opaque = _decode.decode(data.removeprefix(_MARK)) if data.startswith(_MARK) else None
    except (binascii.Error, ValueError, msgspec.MsgspecError, RecursionError):
        return None
    return opaque if opaque and len(opaque) <= _MAX_FIELDS else None
