"""The recorded streams, in ../shared/corpus or in the directory TOKENBUS_CORPUS. Never part of the project."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tokenbus.events.quirks import ApiName

CORPUS = Path(os.environ.get("TOKENBUS_CORPUS", Path(__file__).parents[4] / "shared" / "corpus"))

needs_corpus = pytest.mark.skipif(
    not CORPUS.exists(), reason="no corpus: it lies beside the project, or where TOKENBUS_CORPUS says"
)


APIS: dict[str, ApiName] = {
    "anthropic": "anthropic",
    "openai_chat": "openai-chat",
    "openai_responses": "openai-responses",
    "gemini": "gemini",
}
"""The corpus's names of the APIs, and ours."""


class Recording(msgspec.Struct):
    """A row of the manifest: a stream, and what it says."""

    file: str
    api: str
    vendor: str
    provenance: str
    bytes: int
    expected: dict[str, Any]

    @property
    def api_name(self) -> ApiName:
        return APIS[self.api]

    @property
    def data(self) -> Any:
        return (CORPUS / self.file).read_bytes()


def recordings(*apis: str) -> list[Recording]:
    """The rows of these APIs; none without a corpus."""
    return _rows("", apis)


def further_recordings(*apis: str) -> list[Recording]:
    """Streams and whole answers of more hosts, with less in their manifest; none without a corpus."""
    return _rows("more/", apis)


def _rows(folder: str, apis: tuple[str, ...]) -> list[Recording]:
    manifest = CORPUS / folder / "manifest.jsonl"
    if not manifest.exists():
        return []
    rows = [msgspec.json.decode(line, type=Recording) for line in manifest.read_bytes().splitlines()]
    return [msgspec.structs.replace(row, file=folder + row.file) for row in rows if row.api in apis]
