"""What a provider wants back with a block, inside the output items that a client sends back. Pure.

A reasoning item has a place for it, `encrypted_content`, which no client reads. Other items carry it in a field of
ours, `tokenbus`, which clients keep if they send items back as they came.
"""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from typing import Any

import msgspec

from tokenbus.events.public import BlockComplete

_PREFIX = "tbus1."
_ORIGIN = ("api", "provider")

Json = dict[str, Any]


class Carried(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The provider's data of one block."""

    signature: str | None = None
    opaque: dict[str, str] | None = None
    opaque_blobs: dict[str, str] | None = None
    items: list[dict[str, str]] | None = None
    """Another API's items, in whose place this one stands."""

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of a content part without a signature."""
        return {"opaque": self.opaque, "opaque_blobs": self.opaque_blobs}


def of_block(block: BlockComplete) -> Carried | None:
    """The data of a block; None if its provider wants nothing back."""
    kept = {name for name in block.opaque or {} if name not in _ORIGIN}
    if not (block.signature or kept or block.opaque_blobs):
        return None
    return Carried(signature=block.signature, opaque=block.opaque, opaque_blobs=block.opaque_blobs)


def sealed(carried: Carried) -> str:
    """As the text of `encrypted_content`."""
    return _PREFIX + urlsafe_b64encode(msgspec.json.encode(carried)).decode()


def opened(text: str) -> Carried | None:
    """Read what `sealed` wrote; None if the text is not from here."""
    if not text.startswith(_PREFIX):
        return None
    try:
        return msgspec.json.decode(urlsafe_b64decode(text.removeprefix(_PREFIX)), type=Carried)
    except (Base64Error, ValueError, RecursionError):
        return None


def field_of(carried: Carried | None) -> Json:
    """The field `tokenbus` of an item, if it needs one."""
    return {"tokenbus": msgspec.to_builtins(carried)} if carried else {}


def of_field(value: Json | None) -> Carried:
    """Read the field `tokenbus` of an item. Raises msgspec.ValidationError."""
    return msgspec.convert(value or {}, Carried)
