"""The reader of prefill text alone, without IO: a reply with text, thinking and two calls, in pieces."""

from __future__ import annotations

import time
from statistics import median

from tokenbus.core.prefill.parser import TextReader
from tokenbus.events.frames import TextReading

PIECE = 4
"""Characters per piece: about a token."""
ROUNDS = 5
_WORDS = "The rain in Rome is warm, and it falls on a Tuesday; so they say.\n"
_SETTING = TextReading(stops=("\nAnn:", "\nBob:"), types={"g": {"n": ["array"]}})


def reading(size: int) -> float:
    """Pieces a second of a reply of about this many characters."""
    document = _reply(size)
    pieces = [document[i : i + PIECE] for i in range(0, len(document), PIECE)]

    def once() -> float:
        reader = TextReader.start("run/0", _SETTING, 2**24, "")
        begin = time.process_time()
        for piece in pieces:
            reader.feed(piece)
        reader.end()
        return time.process_time() - begin

    return len(pieces) / median(once() for _ in range(ROUNDS))


def _reply(size: int) -> str:
    quarter = _WORDS * (size // 4 // len(_WORDS))
    numbers = "[" + "1," * (size // 8) + "1]"
    return (
        f"{quarter}<thinking>{quarter}</thinking>\n<function_calls>\n"
        f'<invoke name="f">\n<parameter name="q">{quarter}</parameter>\n</invoke>\n'
        f'<invoke name="g">\n<parameter name="n">{numbers}</parameter>\n</invoke>\n</function_calls>'
    )
