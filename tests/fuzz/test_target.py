"""The fuzzer's check itself: it takes what is sound, and notices what is not."""

from __future__ import annotations

import pytest

from tests.fuzz.target import APIS, check, seed
from tests.fuzz.words import words
from tests.rows import over_rows
from tests.unit.providers.corpus import APIS as CORPUS_APIS
from tests.unit.providers.corpus import Recording, needs_corpus, recordings
from tokenbus.events.normalized import Cut, Normalized
from tokenbus.events.quirks import ApiName
from tokenbus.providers import registry
from tokenbus.providers.gemini.stream import GeminiDecoder


@needs_corpus
@over_rows("row", [row for row in recordings(*CORPUS_APIS) if row.bytes < 3000], ids=lambda row: row.file)
def test_recorded_streams_pass_however_they_are_read(row: Recording) -> None:
    given = bytearray(seed(row.api_name, row.data))
    for way in (0, 5, 8, 16, 32, 40):
        given[1] = way
        check(bytes(given))


@pytest.mark.parametrize("api", APIS)
def test_all_words_in_a_row_pass(api: ApiName) -> None:
    printed = sorted(set(words()))
    assert len(printed) > 150
    check(seed(api, b"data: " + b"".join(printed) + b"\n\n"))
    check(b"")


class Talkative(GeminiDecoder):
    """It does not know when to stop."""

    def end(self) -> list[Normalized]:
        return [Cut("the end"), Cut("once more")]


def test_a_decoder_that_breaks_a_rule_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.get("gemini"), "decoder", lambda **_: Talkative.of(200, {}), raising=False)
    with pytest.raises(AssertionError, match="more than one terminal event"):
        check(seed("gemini", b"data: {}"))
