"""Forms with files: what any reader of them finds is what was put in."""

from __future__ import annotations

from email import policy
from email.parser import BytesParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.providers.request.multipart import File, form

CAT = File("image[]", "cat.png", "image/png", b"\x89PNG\r\n\x1a\n\r\n--x\r\n\x00\xff")


def parts_of(content_type: str, body: bytes) -> list[tuple[str, str | None, str, bytes]]:
    """Name, file name, type and content of each part, as Python's own reader of MIME sees them; what no header may
    hold, and a form has in percent signs, is left as it is."""
    head = f"content-type: {content_type}\r\n\r\n".encode()
    message = BytesParser(policy=policy.HTTP).parsebytes(head + body)
    assert not message.defects
    found: list[tuple[str, str | None, str, bytes]] = []
    for part in message.iter_parts():
        name = part.get_param("name", header="content-disposition")
        content = part.get_payload(decode=True)
        assert isinstance(name, str)
        assert isinstance(content, bytes)
        found.append((name, part.get_filename(), part.get_content_type(), content))
    return found


def test_texts_numbers_truth_lists_and_objects_are_written_as_openais_sdks_write_them() -> None:
    fields = {
        "model": "m",
        "n": 2,
        "stream": True,
        "none": None,
        "svg": {"model": "s", "deep": {"x": 0.5}},
        "of": [1, "a"],
    }
    content_type, body = form(fields, [])
    assert [(name, content) for name, _, _, content in parts_of(content_type, body)] == [
        ("model", b"m"),
        ("n", b"2"),
        ("stream", b"true"),
        ("svg[model]", b"s"),
        ("svg[deep][x]", b"0.5"),
        ("of[]", b"1"),
        ("of[]", b"a"),
    ]


def test_a_file_is_in_the_body_as_the_bytes_that_it_is() -> None:
    content_type, body = form({"prompt": "é\r\n--"}, [CAT])
    assert parts_of(content_type, body) == [
        ("prompt", None, "text/plain", "é\r\n--".encode()),
        ("image[]", "cat.png", "image/png", CAT.content),
    ]
    assert body.count(CAT.content) == 1


@given(
    st.dictionaries(st.text(min_size=1, max_size=6), st.text(max_size=9), max_size=4),
    st.lists(st.binary(max_size=9), max_size=4),
)
def test_no_content_breaks_out_of_its_part(fields: dict[str, str], contents: list[bytes]) -> None:
    files = [File("f", f"{n}.bin", "image/png", content) for n, content in enumerate(contents)]
    content_type, body = form(fields, files)
    boundary = content_type.partition("boundary=")[2].encode()
    pieces = (b"\r\n" + body).split(b"\r\n--" + boundary)
    assert len(pieces) == len(fields) + len(files) + 2
    assert [piece.partition(b"\r\n\r\n")[2] for piece in pieces[1:-1]] == [
        *(text.encode() for text in fields.values()),
        *contents,
    ]


def test_the_boundary_is_that_of_the_content_and_of_no_other() -> None:
    one, again, other = (form({"a": text}, [CAT])[0] for text in ("x", "x", "y"))
    assert one == again != other
    # Texts before and after a boundary are compared separately.
    assert form({"a": "bc"}, [])[0] != form({"ab": "c"}, [])[0]


def test_a_file_that_holds_the_boundary_of_yesterday_gets_another_one_today() -> None:
    stolen = form({}, [CAT])[0].partition("boundary=")[2].encode()
    hostile = File(
        "image", "x.png", "image/png", b"\r\n--" + stolen + b'\r\ncontent-disposition: form-data; name="n"\r\n\r\n9'
    )
    content_type, body = form({}, [hostile])
    assert len(parts_of(content_type, body)) == 1


@pytest.mark.parametrize("name", ['a"; x="b', "a\r\nx: y", "a\nb"])
def test_a_name_cannot_end_its_head(name: str) -> None:
    [(found, *_)] = parts_of(*form({name: "v"}, []))
    assert found == name.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")
