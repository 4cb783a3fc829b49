"""Secrets are found in every spelling, however the bytes that hold them are cut, and nothing else is changed."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from tokenbus_services.redaction import MARK, Redaction, named_secret, secrets_of
from tokenbus_services.settings import HttpTool, McpHttp, ProviderSettings, Settings

KEY = 'sk-aa"b/c\\d+é'


def test_a_secret_is_found_in_every_spelling() -> None:
    redact = Redaction([KEY])
    for spelled in (
        KEY,
        json.dumps(KEY),
        json.dumps(KEY, ensure_ascii=False),
        json.dumps(KEY).replace("/", "\\/"),
        "?key=sk-aa%22b%2Fc%5Cd%2B%C3%A9&x=1",
    ):
        clean = redact(spelled)
        assert MARK in clean
        assert "sk-aa" not in clean
        assert redact.data(spelled.encode()) == clean.encode()


def test_a_short_or_empty_value_is_no_secret() -> None:
    assert Redaction(["", "on", "12345"])("on or off: 12345") == "on or off: 12345"


def test_white_space_around_a_secret_does_not_hide_it() -> None:
    assert Redaction([" secret-key\n"])("Illegal header value b'secret-key'") == f"Illegal header value b'{MARK}'"


def test_a_value_that_is_no_unicode_is_found_too() -> None:
    assert Redaction(["secret-\udcff"]).data(b"<secret-\xff>") == b"<[redacted]>"


SECRETS = ["abcabc", "abcabc-old", "abcabcabd", "cabbage"]


@given(
    pieces=st.lists(st.sampled_from(["a", "b", "c", "abc", "bag", "-old", "-", "d", "\n", *SECRETS])), data=st.data()
)
def test_however_a_stream_is_cut_no_secret_goes_through(pieces: list[str], data: st.DataObject) -> None:
    content = "".join(pieces).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=8)))
    stream = Redaction(SECRETS).stream()
    read = [content[a:b] for a, b in zip([0, *cuts], [*cuts, len(content)], strict=True)]
    clean = b"".join(stream.feed(piece) for piece in read) + stream.end()
    assert not any(secret.encode() in clean for secret in SECRETS)
    if not any(secret.encode() in content for secret in SECRETS):
        assert clean == content


def test_what_ends_in_a_line_end_is_never_held_back() -> None:
    stream = Redaction(["sk-123456"]).stream()
    assert stream.feed(b"data: sk-\n\n") == b"data: sk-\n\n"
    assert stream.feed(b"data: ok sk-12") == b"data: ok "
    assert stream.feed(b"3456 sk-1") == b"[redacted] "
    assert stream.end() == b"sk-1"


def test_variables_whose_name_says_secret_are_secrets() -> None:
    env = {"OPENAI_API_KEY": "a", "GITHUB_TOKEN": "b", "db_password": "c", "KEYBOARD": "qwertz", "TOKENS": "many"}
    assert named_secret(env) == {"a", "b", "c"}


def test_a_process_knows_the_secrets_that_its_settings_name() -> None:
    settings = Settings(
        redis_url="rediss://ada:pass%2Fword@host",
        providers={"p": ProviderSettings(api="openai-chat", api_key_env="P"), "q": ProviderSettings(api="anthropic")},
        tools={"t": HttpTool(url="http://h", header_env={"X": "T"})},
        mcp={"m": McpHttp(url="http://h", header_env={"X": "M"})},
    )
    env = {"P": "p", "ANTHROPIC_API_KEY": "q", "T": "t", "M": "m", "TOKENBUS_REDIS_URL": "redis://:other@h", "U": "u"}
    assert secrets_of(settings, env) - {""} == {"pass/word", "other", "p", "q", "t", "m"}
