"""Uploads to file APIs, without a network: what each provider is sent, and what is made of its answers."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from tokenbus.errors import Malformed, RequestInvalid
from tokenbus.events.quirks import ApiName, Quirks
from tokenbus.events.requests import FileSource, Generate, ImagePart, Message
from tokenbus.providers import registry
from tokenbus.providers.file_api import FileAnswer, FileApi, FileCall, FileToUpload, ProviderFile, lost_files
from tokenbus.providers.gemini import POLLS
from tokenbus_services.mock_provider.request import read_form

PDF = b"%PDF-1.7 \r\n--not-a-boundary--\r\n\x00\xff"
FILE = FileToUpload(kind="document", media_type="application/pdf", size=len(PDF), keep_s=7200.4)
IMAGE = FileToUpload(kind="image", media_type="image/jpeg", size=3, keep_s=10**9)
UPLOAD_URL = "https://generativelanguage.googleapis.com/upload/v1beta/files?upload_id=1"


def api(name: ApiName) -> FileApi:
    files = registry.get(name).files
    assert files is not None
    return files


def uploaded(
    name: ApiName, answers: list[Any], *, file: FileToUpload = FILE, content: bytes = PDF, base: str = ""
) -> tuple[list[FileCall], ProviderFile]:
    """The calls of an upload that is answered so, and the file. An answer is a JSON body, or headers and a body."""
    steps = api(name).upload(file, content, base)
    calls = [next(steps)]
    for answer in answers:
        headers, body = answer if isinstance(answer, tuple) else ({}, answer)
        try:
            calls.append(steps.send(FileAnswer(headers=headers, body=msgspec.json.encode(body))))
        except StopIteration as e:
            return calls, e.value
    raise AssertionError("the upload goes on")


def test_anthropic_is_sent_a_form_with_the_headers_of_its_beta() -> None:
    expires = "2026-11-22T05:00:00Z"
    answer = {"id": "file_011", "type": "file", "filename": "document.pdf", "expires_at": expires}
    [call], made = uploaded("anthropic", [answer], base="/proxy")
    assert (call.method, call.path) == ("POST", "/proxy/v1/files")
    assert call.headers["anthropic-beta"] == "files-api-2025-04-14"
    assert call.headers["anthropic-version"] == "2023-06-01"
    form = read_form(call.headers["content-type"], call.body)
    assert form["file"] == {"filename": "document.pdf", "media_type": "application/pdf", "data": PDF}
    assert form["expires_in_seconds"] == "7200"
    assert made == ProviderFile(file_id="file_011", expires_at=datetime(2026, 11, 22, 5, tzinfo=UTC).timestamp())


def test_openai_gets_the_purpose_and_the_expiry_of_the_file() -> None:
    answer = {"id": "file-1", "object": "file", "expires_at": 1_800_000_000}
    [call], made = uploaded("openai-responses", [answer], base="/v1")
    assert call.path == "/v1/files"
    form = read_form(call.headers["content-type"], call.body)
    assert form["file"]["data"] == PDF
    assert (form["purpose"], form["expires_after[anchor]"], form["expires_after[seconds]"]) == (
        "user_data",
        "created_at",
        "7200",
    )
    assert made == ProviderFile(file_id="file-1", expires_at=1_800_000_000)
    [call], _ = uploaded("openai-responses", [answer], file=IMAGE, content=b"jpg")
    form = read_form(call.headers["content-type"], call.body)
    assert (form["purpose"], form["file"]["filename"]) == ("vision", "image.jpg")


@pytest.mark.parametrize(
    ("name", "field", "most"),
    [("anthropic", "expires_in_seconds", 90 * 86_400), ("openai-chat", "expires_after[seconds]", 30 * 86_400)],
)
def test_no_file_lives_longer_than_its_api_allows(name: ApiName, field: str, most: int) -> None:
    [call], _ = uploaded(name, [{"id": "f"}], file=IMAGE, content=b"jpg")
    assert read_form(call.headers["content-type"], call.body)[field] == str(most)


def gemini_file(state: str = "ACTIVE", **more: Any) -> dict[str, Any]:
    uri = "https://generativelanguage.googleapis.com/v1beta/files/abc-1"
    return {"name": "files/abc-1", "uri": uri, "state": state, "expirationTime": "2026-11-24T05:00:00.5Z", **more}


def test_gemini_gets_the_files_metadata_first_and_then_its_bytes_at_the_returned_url() -> None:
    (begin, whole), made = uploaded(
        "gemini", [({"x-goog-upload-url": UPLOAD_URL}, {}), {"file": gemini_file()}], base="/v1beta"
    )
    assert begin.path == "/upload/v1beta/files"
    assert begin.headers["x-goog-upload-protocol"] == "resumable"
    assert begin.headers["x-goog-upload-command"] == "start"
    assert begin.headers["x-goog-upload-header-content-length"] == str(len(PDF))
    assert begin.headers["x-goog-upload-header-content-type"] == "application/pdf"
    assert msgspec.json.decode(begin.body) == {"file": {"displayName": "document.pdf"}}
    assert (whole.path, whole.body) == (UPLOAD_URL, PDF)
    assert whole.headers == {"x-goog-upload-command": "upload, finalize", "x-goog-upload-offset": "0"}
    assert made.file_id == gemini_file()["uri"]
    assert made.expires_at == datetime(2026, 11, 24, 5, 0, 0, 500_000, tzinfo=UTC).timestamp()


def test_gemini_is_asked_until_a_film_can_be_named() -> None:
    begun: list[Any] = [({"x-goog-upload-url": UPLOAD_URL}, {}), {"file": gemini_file("PROCESSING")}]
    calls, made = uploaded("gemini", [*begun, gemini_file("PROCESSING"), gemini_file()], base="/gw/v1beta")
    assert [(call.method, call.path) for call in calls[2:]] == [("GET", "/gw/v1beta/files/abc-1")] * 2
    assert 0 < calls[2].pause_s < calls[3].pause_s
    assert made.file_id == gemini_file()["uri"]
    assert calls[0].path == "/gw/upload/v1beta/files"
    with pytest.raises(Malformed, match="PROCESSING"):
        uploaded("gemini", [*begun, *([gemini_file("PROCESSING")] * POLLS)])
    with pytest.raises(Malformed, match="FAILED"):
        uploaded("gemini", [*begun, gemini_file("FAILED")])


@pytest.mark.parametrize(
    ("name", "answers"),
    [
        ("anthropic", [{"type": "error"}]),
        ("openai-responses", [{"object": "file"}]),
        ("gemini", [{}]),
        ("gemini", [({"x-goog-upload-url": UPLOAD_URL}, {}), {}]),
        ("gemini", [({"x-goog-upload-url": UPLOAD_URL}, {}), {"file": gemini_file(name="files/../keys")}]),
    ],
)
def test_an_answer_that_is_none_is_malformed(name: ApiName, answers: list[Any]) -> None:
    with pytest.raises(Malformed):
        uploaded(name, answers)


def test_what_requests_can_name_by_an_id_differs() -> None:
    assert api("anthropic").takes("image", "image/png")
    assert api("anthropic").takes("document", "application/pdf")
    assert not api("anthropic").takes("document", "text/plain")
    assert api("openai-responses").takes("image", "image/png")
    assert api("openai-chat").takes("document", "application/pdf")
    assert not api("openai-chat").takes("image", "image/png")
    assert api("gemini").takes("document", "video/mp4")
    assert registry.get("openai-images").files is None


def test_chat_completions_says_that_it_takes_no_image_by_its_id() -> None:
    image = Message(role="user", content=[ImagePart(source=FileSource(file_id="file-1"))])
    request = Generate(provider="p", model="m", messages=[image])
    with pytest.raises(RequestInvalid) as e:
        registry.get("openai-chat").build(request, [], Quirks())
    assert e.value.where == "messages[0].content[0].source"


@pytest.mark.parametrize(
    ("status", "body", "lost"),
    [
        (404, b'{"type":"error","error":{"type":"not_found_error","message":"File not found: file_a"}}', ("file_a",)),
        (
            404,
            b'{"error":{"message":"expired","details":{"error_code":"file_expired"}}}',
            ("file_a", "https://g/v1/f/b"),
        ),
        (403, b'{"error":{"message":"You do not have permission to access the File b or it may not exist."}}', None),
        (400, b'{"error":{"message":"max_tokens: too many"}}', ()),
        (429, b'{"error":{"message":"file_a"}}', ()),
        (500, b"file_a", ()),
    ],
)
def test_a_provider_names_the_files_that_it_does_not_have(
    status: int, body: bytes, lost: tuple[str, ...] | None
) -> None:
    expected = ("https://g/v1/f/b",) if lost is None else lost
    found = lost_files(status, body, ["file_a", "https://g/v1/f/b"])
    assert set(expected) <= set(found)
    assert lost is None or found == expected
