"""What a request names as files and stores of a provider, in any way that the provider would understand."""

from __future__ import annotations

import re
from urllib.parse import unquote

import msgspec
import pytest

from tokenbus_services.gateway.forward.owners import names_in
from tokenbus_services.gateway.problem import Refusal

IN_TEXT = r'{"\u0066ile_id":"FILE","file_id":"mine"}'
"""What a block brings back to its provider: JSON as text, and of two members of a name a provider may take any."""


@pytest.mark.parametrize(
    "request_",
    [
        '{"file_id":"FILE"}',
        '{"a":[{"source":{"fileId":"FILE"}}]}',
        '{"input_file_id":"FILE"}',
        '{"file_ids":["x]","FILE"]}',
        f'{{"vector_store_ids":["{"x" * 30_000}","FILE"]}}',
        '{"file_uri":"https://a.example/v1/files/FILE?alt=media"}',
        '{"fileUri":"https://a.example/v1/files/FILE/"}',
        f'{{"url":"https://a.example/v1/%66iles/FILE?{"x" * 600}"}}',
        '{"cachedContent":"cachedContents/FILE"}',
        r'{"\u0066ile_id":"FILE"}',
        msgspec.json.encode({"opaque": {"fields": IN_TEXT}}).decode(),
        msgspec.json.encode({"opaque": {"fields": msgspec.json.encode([{"more": IN_TEXT}]).decode()}}).decode(),
    ],
)
def test_a_file_is_found_however_a_request_names_it(request_: str) -> None:
    named = names_in(request_.replace("FILE", "file-abc").encode())
    assert "file-abc" in {word for each in named for word in re.findall(r"[\w-]+", unquote(each))}


def test_a_text_about_files_names_none() -> None:
    talk = {"content": 'the "file_id" is "file-abc"', "file_uri": "data:a/files/b", "url": "https://a.example/b"}
    assert [*names_in(msgspec.json.encode(talk))] == []


def test_what_is_too_deep_to_be_looked_at_is_refused() -> None:
    deep = msgspec.json.encode({"fields": '{"file_id":' * 50_000 + '"x"' + "}" * 50_000})
    with pytest.raises(Refusal, match="too deep"):
        list(names_in(deep))
