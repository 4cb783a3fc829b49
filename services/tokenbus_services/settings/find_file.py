"""Which settings file a command uses if the environment names none."""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path

NAME = "tokenbus.toml"


def use_file_here(env: MutableMapping[str, str]) -> Path | None:
    """If TOKENBUS_CONFIG is not set, set it to the `tokenbus.toml` of the working directory; return that file, if there
    is one.

    Processes that the command starts then read the same file. An empty TOKENBUS_CONFIG means: no file.
    """
    if "TOKENBUS_CONFIG" in env:
        return None
    file = Path.cwd() / NAME
    if not file.is_file():
        return None
    env["TOKENBUS_CONFIG"] = str(file)
    return file
