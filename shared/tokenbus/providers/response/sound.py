"""The sound of an answer, collected from its pieces until its block ends."""

from __future__ import annotations

import binascii
from base64 import b64decode, b64encode
from collections.abc import Sequence

from tokenbus.errors import Malformed

_HEADERS = ((b"ID3", "audio/mpeg"), (b"OggS", "audio/ogg"), (b"fLaC", "audio/flac"), (b"RIFF", "audio/wav"))
_MPEG_SYNC = 0xFFE0
"""The first eleven bits of a frame of MPEG audio or AAC; ISO/IEC 11172-3, 2.4.1.3 and 13818-7, 6.2."""


def joined(pieces: Sequence[str]) -> str:
    """Join pieces that were encoded as base64 one by one. Raises Malformed."""
    try:
        contents = [b64decode(piece, validate=True) for piece in pieces]
    except (binascii.Error, ValueError) as e:
        raise Malformed("audio", f"not base64: {e}") from None
    return b64encode(b"".join(contents)).decode()


def media_type_of(base64: str) -> str:
    """The media type by the header; ``audio/pcm`` without one."""
    content = b64decode(base64[:16])
    for header, media_type in _HEADERS:
        if content.startswith(header):
            return media_type
    sync = int.from_bytes(content[:2], "big")
    if len(content) > 1 and sync & _MPEG_SYNC == _MPEG_SYNC:
        return "audio/aac" if sync & 0x0006 == 0 else "audio/mpeg"
    return "audio/pcm"
