"""`python -m tests.fuzz SECONDS [libFuzzer options]`: fuzz the decoders for so long.

The recorded streams, where they are, are its first inputs. A failing input is kept in the temporary directory, under a
name that is shown; `python -m tests.fuzz 0 FILE` reads it again. Without atheris, which not every machine can have, it
says so and ends.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

MAX_INPUT = 8192
KEPT = Path(tempfile.gettempdir(), "tokenbus-fuzz-")
OPTIONS = (f"-max_len={MAX_INPUT}", "-rss_limit_mb=1024", "-timeout=10", "-verbosity=0", f"-artifact_prefix={KEPT}")


def main(arguments: Sequence[str]) -> None:
    """Fuzz. Ends the process with libFuzzer's exit code."""
    try:
        fuzzer: Any = import_module("atheris")
    except ImportError:
        print("skipped: atheris is not installed; it needs Linux or macOS, and a Python that it has a wheel for")
        return
    with fuzzer.instrument_imports(include=["tokenbus.providers"]):
        from tests.fuzz.target import check, seed
    from tests.fuzz.words import words
    from tests.unit.providers.corpus import APIS, recordings

    seconds, *more = arguments or ["60"]
    with tempfile.TemporaryDirectory() as directory:
        inputs = Path(directory, "inputs")
        inputs.mkdir()
        for number, row in enumerate(recordings(*APIS)):
            (inputs / str(number)).write_bytes(seed(row.api_name, row.data[:MAX_INPUT]))
        dictionary = Path(directory, "words")
        dictionary.write_text("".join(f"{_quoted(word)}\n" for word in sorted(set(words()))))
        options = [f"-max_total_time={seconds}", f"-dict={dictionary}", *OPTIONS]
        fuzzer.Setup([sys.argv[0], *(more if more and seconds == "0" else [*options, *more, str(inputs)])], check)
        print(f"fuzzing the decoders for {seconds} s", flush=True)
        fuzzer.Fuzz()


def _quoted(word: bytes) -> str:
    """A line of libFuzzer's dictionary."""
    plain = (chr(b) if 32 <= b < 127 and b not in b'"\\' else f"\\x{b:02x}" for b in word)
    return f'"{"".join(plain)}"'


if __name__ == "__main__":
    main(sys.argv[1:])
