"""Loads scripts from a directory.

`NAME.json` is a `Script` as JSON, with paths relative to the directory; `NAME.sse` is a recording, a script of one
turn; in a directory `NAME`, each `*.sse` is a turn, in order of name.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from tokenbus_services.mock_provider.script import Recording, Script, Source, Turn


def load_scripts(directory: Path) -> list[Script]:
    """Load all scripts of a directory, in order of name. Raises OSError, or ValueError naming the file."""
    scripts = [script for path in sorted(directory.iterdir()) if (script := _load(path)) is not None]
    names = [script.name for script in scripts]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{directory}: more than one script is called {', '.join(twice)}")
    return scripts


def recorded(name: str, *streams: Path) -> Script:
    """A script of recordings, one per turn."""
    return Script(name=name, turns=tuple(Turn(says=Recording(stream=str(stream))) for stream in streams))


def _load(path: Path) -> Script | None:
    if path.suffix == ".json":
        return _read(path)
    if path.suffix == ".sse":
        return recorded(path.stem, path)
    if path.is_dir() and (streams := sorted(path.glob("*.sse"))):
        return recorded(path.name, *streams)
    return None


def _read(path: Path) -> Script:
    try:
        script = msgspec.json.decode(path.read_bytes(), type=Script)
    except msgspec.DecodeError as e:
        raise ValueError(f"{path}: {e}") from None
    turns = (msgspec.structs.replace(turn, says=_located(turn.says, path.parent)) for turn in script.turns)
    return msgspec.structs.replace(script, name=script.name or path.stem, turns=tuple(turns))


def _located(says: Source, directory: Path) -> Source:
    """A recording with its paths resolved against the directory."""
    if not isinstance(says, Recording):
        return says
    body = None if says.body is None else str(directory / says.body)
    return Recording(stream=str(directory / says.stream), body=body)
