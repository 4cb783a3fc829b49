"""Blob ids and media types: only safe characters may reach a path or a header."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.blobs import MAX_MEDIA_TYPE_CHARS, blob_id_of, parse_blob_id, parse_media_type
from tokenbus.errors import BlobRefused

EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_an_id_is_the_sha256_of_the_content() -> None:
    assert blob_id_of(b"") == f"sha256:{EMPTY}"
    assert parse_blob_id(f"sha256:{EMPTY}") == EMPTY


@given(st.text())
def test_no_other_text_is_an_id(text: str) -> None:
    with pytest.raises(BlobRefused):
        parse_blob_id(text)


@pytest.mark.parametrize(
    ("given_as", "parsed"),
    [
        ("image/png", "image/png"),
        ("IMAGE/SVG+XML", "image/svg+xml"),
        ("text/plain; charset=UTF-8", "text/plain;charset=UTF-8"),
        ('text/plain ;\tCharset="utf-8";', "text/plain;charset=utf-8"),
        ("application/vnd.oasis.opendocument.text", "application/vnd.oasis.opendocument.text"),
    ],
)
def test_a_media_type_has_one_spelling(given_as: str, parsed: str) -> None:
    assert parse_media_type(given_as) == parsed
    assert parse_media_type(parsed) == parsed


@pytest.mark.parametrize(
    "text",
    [
        "",
        "image",
        "image/",
        "/png",
        "image/..",
        "../png",
        "a/b/c",
        "text/plain\r\nX-Evil: 1",
        "text/plain\n",
        "text/plain; a",
        'text/plain; a="b c"',
        "text/plain; a=b\r\n",
        "image/png#1",
        "x/" + "y" * MAX_MEDIA_TYPE_CHARS,
        "bild/größe",
    ],
)
def test_what_is_no_media_type_is_refused(text: str) -> None:
    with pytest.raises(BlobRefused):
        parse_media_type(text)


@given(st.from_regex(r"[ -~\r\n]{0,20}/[ -~\r\n]{0,20}(;[ -~\r\n]{0,20})?"))
def test_what_passes_is_safe_in_a_path_and_a_header(text: str) -> None:
    try:
        parsed = parse_media_type(text)
    except BlobRefused:
        return
    assert re.fullmatch(r"[\w!$&^.+-]+/[\w!$&^.+-]+(;[\w!$&^.+-]+=[\w!$&^.+-]+)*", parsed, re.ASCII)
    assert not any(segment.startswith(".") for segment in parsed.split("/"))
