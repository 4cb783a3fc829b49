"""Secrets are found in every spelling, however the bytes that hold them are cut, and nothing else is changed."""

from __future__ import annotations

import base64
import html
import json
import re
import textwrap
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, unquote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenbus_services.redaction.events import MAX_HELD_LINES, MAX_LINE_BYTES, MAX_TAILS, RedactedEvents
from tokenbus_services.redaction.known_secrets import named_secret, secrets_of
from tokenbus_services.redaction.redactor import MARK, Redaction
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
def test_no_secret_is_emitted_for_any_cut_of_a_stream(pieces: list[str], data: st.DataObject) -> None:
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


def escaped_json(key: str) -> str:
    return "".join(f"\\u{ord(char):04x}" for char in key)


SPELLINGS: dict[str, Callable[[str], str]] = {
    "as it is": lambda key: key,
    "System.Text.Json": lambda key: key.replace("+", "\\u002B").replace("&", "\\u0026"),
    "PHP": lambda key: key.replace("/", "\\/"),
    "all escaped": escaped_json,
    "all escaped, in capitals": lambda key: escaped_json(key).upper().replace("\\U", "\\u"),
    "JSON in JSON": lambda key: json.dumps(json.dumps(key.replace("/", "\\/"))),
    "escapes in JSON": lambda key: json.dumps(escaped_json(key)),
    "an url": lambda key: quote(key, safe=""),
    "an url in small letters": lambda key: quote(key, safe="").lower() if key.islower() else quote(key, safe=""),
    "every byte of an url": lambda key: "".join(f"%{byte:02x}" for byte in key.encode()),
    "an url in an url": lambda key: quote(quote(key, safe=""), safe=""),
    "HTML": html.escape,
    "HTML by number": lambda key: "".join(f"&#{ord(char)};" for char in key),
    "HTML by hexadecimal number": lambda key: "".join(f"&#X{ord(char):04X};" for char in key),
    "HTML by name": lambda key: key.replace("+", "&plus;").replace("/", "&sol;").replace("_", "&lowbar;"),
    "HTML in JSON": lambda key: "".join(f"\\u0026#{ord(char)};" for char in key),
    "HTML in HTML": lambda key: html.escape("".join(f"&#{ord(char)};" for char in key)),
    "base64": lambda key: base64.b64encode(key.encode()).decode(),
    "Basic": lambda key: "Basic " + base64.b64encode(f":{key}".encode()).decode(),
    "Basic of a name": lambda key: "Basic " + base64.b64encode(f"me:{key}\n".encode()).decode(),
    "base64 for urls": lambda key: base64.urlsafe_b64encode(key.encode()).decode().rstrip("="),
    "capitals": str.upper,
    "small letters": str.lower,
    "hexadecimal": lambda key: key.encode().hex(),
    "hexadecimal in capitals": lambda key: key.encode().hex().upper(),
    "base64 of a MIME body": lambda key: base64.encodebytes(f"{'x' * 50}{key}{'y' * 60}".encode()).decode(),
    "base64 of PEM": lambda key: "\\r\\n".join(
        textwrap.wrap(base64.b64encode(f"{'x' * 50}{key}{'y' * 60}".encode()).decode(), 64)
    ),
    "base64 of a MIME body in JSON": lambda key: json.dumps(
        base64.encodebytes(f"{'x' * 50}{key}{'y' * 60}".encode()).decode()
    ),
    "base64 of a MIME body in an url": lambda key: quote(
        base64.encodebytes(f"{'x' * 50}{key}{'y' * 60}".encode()).decode(), safe=""
    ),
    "base64 in JSON": lambda key: base64.b64encode(key.encode()).decode().replace("+", "\\u002b").replace("/", "\\/"),
}
PLACES = {
    "an error": '{{"error":{{"message":"Incorrect API key provided: {}."}}}}\n',
    "a delta": 'data: {{"choices":[{{"delta":{{"content":"it is {} I think"}}}}]}}\n\n',
    "arguments": 'data: {{"partial_json":"{{\\"key\\":\\"{}\\"}}"}}\n\n',
    "a page": '<a href="https://x/?a=1&key={}&b=2">50% &amp; more</a>',
    "text alone": "{}",
}
keys = st.text("abcdefXYZ0189-_+/=.", min_size=16, max_size=60).map("sk-".__add__)


def undone(text: str) -> list[str]:
    """What readers of JSON, urls, HTML, hexadecimal and base64 would make of a text, escapes inside of escapes
    included.
    """
    layers = [text]
    for _ in range(6):
        text = re.sub(r"\\u([0-9a-fA-F]{4})", lambda found: chr(int(found[1], 16)), text)
        text = re.sub(r"\\+([\"/\\]?)", r"\1", text) if not re.search(r"\\u", text) else text.replace("\\\\", "\\")
        text = html.unescape(unquote(text, errors="replace"))
        layers.append(text)
    unfolded = re.sub(r"\\+[rn]|[\r\n]", "", " ".join(layers))
    layers += [bytes.fromhex(run).decode("latin-1") for run in re.findall(r"(?:[0-9a-fA-F]{2}){16,}", text)]
    for run in re.findall(r"[A-Za-z0-9+/_-]{16,}", " ".join([*layers, unfolded])):
        for cut in range(4):
            whole = run[cut : cut + (len(run) - cut) // 4 * 4].translate(str.maketrans("-_", "+/"))
            layers.append(base64.b64decode(whole).decode("latin-1"))
    return layers


def shows(key: str, text: str) -> bool:
    """Whether a reader finds the key in the text, in capitals or not."""
    return key in text or key.upper() in text or key.lower() in text


def test_a_fold_is_seen_wherever_the_data_is_cut() -> None:
    key = "sk-0000000000000000"
    content = PLACES["arguments"].format(SPELLINGS["base64 of a MIME body"](key)).encode()
    for cut in range(len(content)):
        stream = Redaction([key]).stream()
        assert MARK.encode() in stream.feed(content[:cut]) + stream.feed(content[cut:]) + stream.end(), cut


@settings(max_examples=300, deadline=None)
@given(key=keys, spelling=st.sampled_from(sorted(SPELLINGS)), place=st.sampled_from(sorted(PLACES)), data=st.data())
def test_a_key_in_any_spelling_place_and_cut_is_found_nowhere(
    key: str, spelling: str, place: str, data: st.DataObject
) -> None:
    planted = PLACES[place].format(SPELLINGS[spelling](key))
    assert any(shows(key, layer) for layer in undone(planted)) or "base64" in spelling.lower() or "Basic" in spelling
    content = planted.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=12)))
    stream = Redaction([key]).stream()
    read = [content[a:b] for a, b in zip([0, *cuts], [*cuts, len(content)], strict=True)]
    cut = (b"".join(stream.feed(piece) for piece in read) + stream.end()).decode()
    for clean in (cut, Redaction([key])(planted)):
        assert MARK in clean
        assert not any(shows(key, layer) for layer in undone(clean)), clean


@given(text=st.text('\\u002B%&#;ampx/"n5', max_size=60), data=st.data())
def test_text_without_a_secret_passes_unchanged_for_every_cut(text: str, data: st.DataObject) -> None:
    content = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=8)))
    stream = Redaction(["sk-a+b/c_d"]).stream()
    read = [content[a:b] for a, b in zip([0, *cuts], [*cuts, len(content)], strict=True)]
    assert b"".join(stream.feed(piece) for piece in read) + stream.end() == content


def delta(api: str, text: str, index: int, *, thinking: bool = False) -> bytes:
    """One event of a stream as these providers write it."""
    data: dict[str, object]
    match api:
        case "chat":
            data = {"choices": [{"index": index, "delta": {"reasoning" if thinking else "content": text}}], "id": "c-s"}
        case "calls":
            call = {"index": index, "function": {"arguments": text}}
            data = {"id": "chat-sk", "choices": [{"delta": {"tool_calls": [call]}}]}
        case "anthropic":
            kind = "thinking" if thinking else "text"
            data = {"type": "content_block_delta", "index": index, "delta": {"type": f"{kind}_delta", kind: text}}
        case "gemini":
            part = {"text": text, "thought": thinking}
            data = {
                "candidates": [{"content": {"parts": [part], "role": "model"}, "index": index}],
                "modelVersion": "s",
            }
        case _:
            data = {"type": "response.output_text.delta", "delta": text, "output_index": index}
    return json.dumps(data, ensure_ascii=bool(index % 2)).encode()


def texts_by_block(lines: bytes) -> dict[tuple[object, str], str]:
    """All strings of a stream's events, those of one key and index joined in their order."""
    texts: dict[tuple[object, str], str] = {}

    def walk(value: Any, index: object, key: str) -> None:
        if isinstance(value, dict):
            index = value.get("index", value.get("output_index", index))
            for name, inner in value.items():
                walk(inner, index, name)
        elif isinstance(value, list):
            for inner in value:
                walk(inner, index, key)
        elif isinstance(value, str):
            texts[index, key] = texts.get((index, key), "") + value

    for event in re.split(rb"(?:\r\n){2}|\n{2}|\r{2}", lines):
        if data := b"\n".join(line[6:] for line in re.split(rb"[\r\n]+", event) if line.startswith(b"data: ")):
            walk(json.loads(data), None, "")
    return texts


def with_escaped_keys(event: bytes) -> bytes:
    return re.sub(
        rb'"(content|reasoning|arguments|text|thinking|delta)":',
        lambda found: b'"' + escaped_json(found[1].decode()[0]).encode() + found[1][1:] + b'":',
        event,
    )


def shadowed(event: bytes) -> bytes:
    """Each text twice in its object; readers take the second."""
    return re.sub(rb'"(content|reasoning|arguments|thinking)": "', rb'"\1": "words, ", "\1": "', event)


HIDDEN: dict[str, Callable[[bytes], bytes]] = {
    "not": lambda event: event,
    "by escaped keys": with_escaped_keys,
    "on several lines": lambda event: b"\ndata: ".join(
        json.dumps(json.loads(event), indent=1, ensure_ascii=False).encode().splitlines()
    ),
    "by two values of a key": shadowed,
}


def cut(data: st.DataObject, content: Any, most: int) -> list[Any]:
    """The content in pieces, cut anywhere."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=most)))
    return [content[a:b] for a, b in zip([0, *cuts], [*cuts, len(content)], strict=True)]


APIS = ["chat", "calls", "anthropic", "gemini", "responses"]


@settings(max_examples=400, deadline=None)
@given(
    key=keys,
    spelling=st.sampled_from(sorted(SPELLINGS)),
    api=st.sampled_from(APIS),
    line_end=st.sampled_from([b"\n", b"\r\n", b"\r"]),
    beside=st.sampled_from([None, "", "the words that come beside it: s", "sk-"]),
    thinking=st.booleans(),
    hidden=st.sampled_from(sorted(HIDDEN)),
    data=st.data(),
)
def test_a_key_split_over_events_is_found_in_any_spelling_and_cut(
    key: str,
    spelling: str,
    api: str,
    line_end: bytes,
    beside: str | None,
    thinking: bool,
    hidden: str,
    data: st.DataObject,
) -> None:
    pieces = cut(data, f"It is {SPELLINGS[spelling](key)}, I think.", 40)
    events: list[bytes] = []
    for n, piece in enumerate(pieces):
        hide = HIDDEN[hidden] if n % 2 else HIDDEN["not"]
        events.append(hide(delta(api, piece, 1, thinking=thinking)))
        if beside is not None:
            events.append(delta(api, beside, 2, thinking=thinking))
            other = {"type": "other", "beside": {"of": {"index": 3, "delta": json.loads(delta(api, beside, 3))}}}
            events.append(json.dumps(other).encode())
    content = b"".join(b"event: e" + line_end + b"data: " + event + 2 * line_end for event in events)
    content = content.replace(b"\ndata: ", line_end + b"data: ") if hidden == "on several lines" else content
    stream = RedactedEvents(Redaction([key]))
    clean = b"".join(stream.feed(piece) for piece in cut(data, content, 60)) + stream.end()
    texts = texts_by_block(clean)
    joined = [text for (index, _), text in texts.items() if index == 1]
    assert any(MARK in text for text in joined)
    for value in (*texts.values(), clean.decode()):
        assert not any(shows(key, layer) for layer in undone(value)), value
    assert any(text.startswith("It is ") and text.endswith(", I think.") for text in joined)


@pytest.mark.parametrize("spelling", [name for name in SPELLINGS if "MIME" in name or "PEM" in name])
def test_a_fold_is_seen_wherever_its_text_is_split(spelling: str) -> None:
    key = "sk-" + 60 * "Z"
    text = SPELLINGS[spelling](key)
    for at in range(8, len(text)):
        stream = RedactedEvents(Redaction([key]))
        pieces = text[: at - 8], text[at - 8 : at], text[at:]  # the first one may hold a whole fold before the key
        events = [b"data: " + delta("chat", piece, 1) + b"\n\n" for piece in pieces]
        clean = b"".join(map(stream.feed, events)) + stream.end()
        joined = texts_by_block(clean)[1, "content"]
        assert MARK in joined, at
        assert not any(shows(key, layer) for layer in undone(joined)), at


@pytest.mark.parametrize("at", [4, 12, 18])
@pytest.mark.parametrize("read", [4096, 2**20])
def test_a_key_whose_rest_comes_with_an_image_is_found(at: int, read: int) -> None:
    key = "sk-123456-and-more"
    first, rest = key[:at], f"{key[at:]} {'A' * (2 * MAX_LINE_BYTES)} {key[:at]}"
    texts = ["it is " + first, rest, key[at:] + "!", f"{'A' * (2 * MAX_LINE_BYTES)} {first}", key[at:]]
    content = b"".join(b"data: " + delta("chat", text, 0) + b"\n\n" for text in texts)
    stream = RedactedEvents(Redaction([key]))
    clean = b"".join(stream.feed(content[i : i + read]) for i in range(0, len(content), read)) + stream.end()
    [text] = [text for (index, name), text in texts_by_block(clean).items() if name == "content"]
    assert key not in text
    assert text.count("A") == 4 * MAX_LINE_BYTES


def test_a_key_behind_more_texts_than_any_answer_has_is_found() -> None:
    key = "sk-123456-and-more"
    event = 'data: {"%s":"%s"}\n\n'
    content = event % ("content", "sk-123456") + "".join(event % (f"k{n}", "sk-1234") for n in range(3 * MAX_TAILS))
    content += event % ("content", "-and-more") + event % ("late", "sk-123456") + event % ("late", "-and-more")
    stream = RedactedEvents(Redaction([key]))
    clean = stream.feed(content.encode()) + stream.end()
    for name in ("content", "late"):
        assert key not in "".join(json.loads(line[6:]).get(name, "") for line in clean.splitlines() if line)


def test_a_thousand_texts_that_end_as_a_key_begins_go_through_unchanged() -> None:
    """A long answer: the blocks of a model, or the arguments of a call, of which many end in an "s"."""
    content = b"".join(b"data: " + delta("responses", "cats", n) + b"\n\n" for n in range(1_000))
    content += b"".join(b'data: {"file-%d.py":"tasks"}\n\n' % n for n in range(1_000))
    stream = RedactedEvents(Redaction(["sk-123456-and-more"]))
    assert b"".join(stream.feed(content[i : i + 4096]) for i in range(0, len(content), 4096)) + stream.end() == content


@settings(deadline=None)
@given(
    words=st.lists(st.sampled_from(["s", "sk", "sk-a", "sk-a+b/c_d, no", "\\", "%", "%7", "&am", "é", "\n", " "])),
    api=st.sampled_from(APIS),
    data=st.data(),
)
def test_events_without_a_secret_go_through_unchanged(words: list[str], api: str, data: st.DataObject) -> None:
    content = b"".join(b"data: " + delta(api, word, n % 3) + b"\n\n" for n, word in enumerate(words))
    stream = RedactedEvents(Redaction(["sk-a+b/c_d, yes"]))
    assert b"".join(stream.feed(piece) for piece in cut(data, content, 30)) + stream.end() == content


def test_only_an_event_that_may_begin_a_secret_waits_and_only_for_a_while() -> None:
    stream = RedactedEvents(Redaction(["sk-123456-and-more"]))
    event = b'data: {"content":"%s"}\n\n'
    assert stream.feed(event % b"a task") == event % b"a task"
    assert stream.feed(event % b"sk-1") == b""
    assert stream.feed(event % b"4") == event % b"sk-1" + event % b"4"
    assert stream.feed(event % b"sk-12") == b""
    ping = b": ping\n\n"
    out = b""
    for _ in range(MAX_HELD_LINES):
        out += stream.feed(ping)
    assert out.startswith(event % b"sk-12")
    assert stream.feed(event % b"3456-and-more!") == event % b"[redacted]!"


def test_the_start_of_a_secret_is_not_emitted_if_its_rest_never_comes() -> None:
    event = b'data: {"content":"%s"}\n\n'
    stream = RedactedEvents(Redaction(["sk-123456-and-more"]))
    assert stream.feed(event % b"sk-1234") + stream.feed(event % b"56-and") == b""
    assert stream.end() == event % b"" + event % b"[redacted]"
    whole = Redaction(["sk-123456-and-more"]).stream()
    assert whole.feed(b"it was sk-123456-and-mor") + whole.end() == b"it was [redacted]"


def test_a_line_as_long_as_an_image_does_not_wait_for_its_end() -> None:
    stream = RedactedEvents(Redaction(["sk-123456-and-more"]))
    image = b'data: {"b64":"' + b"A" * MAX_LINE_BYTES
    assert stream.feed(image) == image
    assert stream.feed(b'AAA"}') == b'AAA"}'
    assert stream.feed(b"\ndata: x\n") == b"\ndata: x\n"


@pytest.mark.parametrize("size", [1, 7, 400])
def test_a_process_without_secrets_changes_no_byte(size: int) -> None:
    data = 'data: {"text": "a%20b &amp; \\u002b \\\\ % é"}\n\n'.encode() * 3
    nothing = Redaction([])
    assert nothing.data(data) is data
    for stream in (nothing.stream(), RedactedEvents(nothing)):
        out = b"".join([stream.feed(data[i : i + size]) for i in range(0, len(data), size)])
        assert out + stream.end() == data
