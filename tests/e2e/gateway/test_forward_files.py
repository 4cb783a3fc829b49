"""Forms, sounds, files and batches are forwarded as they come; files and batches are their tenant's own."""

from __future__ import annotations

import io
from collections.abc import Generator, Iterator
from hashlib import blake2b
from typing import Any

import anthropic
import google.genai
import httpx
import msgspec
import openai
import pytest

from tests.e2e.gateway.served import auth, forwarded_routes
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.events.usage import Usage
from tokenbus.testing import LocalBus
from tokenbus_services.gateway.budgets.spend import ClientSpend, read_spend
from tokenbus_services.gateway.forward.table import BASES, TABLE
from tokenbus_services.gateway.keys.key import NewKey, new_key
from tokenbus_services.mock_provider import Picture, Reply
from tokenbus_services.settings.tables.gateway import ForwardKind

Json = dict[str, Any]
NAMES = ("ada", "bob", "boss", "narrow", "poor", "limited", "metered")
KEYS: dict[str, NewKey] = {name: new_key() for name in NAMES}
RULES = {
    "boss": "operator = true",
    "narrow": 'models = ["openai-chat/ears"]',
    "poor": "max_budget = 1",
    "limited": "rpm_limit = 1",
    "metered": "max_budget = 1",
}
KINDS: tuple[ForwardKind, ...] = ForwardKind.__args__  # type: ignore[attr-defined]
SETTINGS = (
    f"[gateway]\nforward = {msgspec.json.encode(KINDS).decode()}\nbody_bytes = 3000000\nforward_bytes = 30000000\n"
    'drop_unsupported = ["prompt"]\n'
    '[gateway.aliases]\ndefault = ["openai-chat/ears"]\n'
    + "".join(
        f'[gateway.prices."{name}/"]\ninput = 1\noutput = 1\nmax_output = 10\n'
        for name in ("openai-chat", "openai-responses", "gemini")
    )
    + "".join(f'[gateway.keys.{name}]\nsha256 = "{key.sha256}"\n{RULES.get(name, "")}\n' for name, key in KEYS.items())
)
SOUND = bytes(range(256)) * 40
PICTURE = Picture(data=b"\x89PNG not really")
BOUND = "XyZ"
BETAS: Any = ["files-api-2025-04-14"]


@pytest.fixture(scope="module")
def bus() -> Generator[LocalBus]:
    with LocalBus(SETTINGS) as running:
        for name in ("ears", "voice", "other", "text"):
            running.model_says(name, Reply(text="one two three"))
        running.model_says("brush", Reply(pictures=(PICTURE,), usage=Usage(input=5, output=9)))
        yield running


@pytest.fixture
def http(bus: LocalBus) -> Generator[httpx.Client]:
    with httpx.Client(base_url=bus.gateway, timeout=60, headers=auth(KEYS["ada"])) as client:
        yield client


def openai_client(bus: LocalBus, key: str = "ada") -> openai.OpenAI:
    return openai.OpenAI(api_key=KEYS[key].text, base_url=f"{bus.gateway}/v1", max_retries=0)


def anthropic_client(bus: LocalBus, key: str = "ada") -> anthropic.Anthropic:
    headers = {"x-tokenbus-provider": "anthropic"}
    base = f"{bus.gateway}/anthropic"
    return anthropic.Anthropic(api_key=KEYS[key].text, base_url=base, max_retries=0, default_headers=headers)


def google_client(bus: LocalBus, key: str = "ada") -> google.genai.Client:
    options: Any = {"base_url": f"{bus.gateway}/gemini", "headers": {"x-tokenbus-provider": "gemini"}}
    return google.genai.Client(api_key=KEYS[key].text, http_options=options)


def part(name: str, value: bytes, more: str = "") -> bytes:
    head = f'--{BOUND}\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'
    return head.encode() + value + b"\r\n"


FILE = part("file", SOUND, '; filename="a.wav"')
END = f"--{BOUND}--\r\n".encode()


def post_form(http: httpx.Client, content: bytes | Iterator[bytes], key: str = "ada", bound: str = BOUND) -> Any:
    headers = {**auth(KEYS[key]), "content-type": f"multipart/form-data; boundary={bound}"}
    return http.post("/v1/audio/transcriptions", content=content, headers=headers)


def code_of(answer: httpx.Response) -> str:
    return answer.json()["error"]["code"]


# --- forms and sounds ---------------------------------------------------------------------------------------------


def test_openais_client_speaks_and_listens(bus: LocalBus) -> None:
    with openai_client(bus) as client:
        heard = client.audio.transcriptions.create(model="openai-chat/ears", file=("a.wav", SOUND))
        spoken = client.audio.speech.create(model="openai-chat/voice", voice="alloy", input="hi")
    sent = bus.exchanges[-2].http_request
    assert heard.text == blake2b(SOUND).hexdigest()
    assert spoken.content == bytes(range(256)) * 2
    assert spoken.response.headers["content-type"] == "audio/mpeg"
    assert b'name="model"\r\n\r\nears\r\n' in sent.body
    assert KEYS["ada"].text not in str(dict(sent.headers))


def test_openais_client_edits_an_image(bus: LocalBus) -> None:
    with openai_client(bus) as client:
        made = client.images.edit(model="openai-chat/brush", image=("a.png", b"\x89PNG"), prompt="a hat")
    assert made.data
    assert made.data[0].b64_json


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_the_model_may_come_after_the_file_and_in_any_pieces(bus: LocalBus, http: httpx.Client, size: int) -> None:
    whole = FILE + part("model", b"openai-chat/ears") + part("language", b"en") + END
    pieces = (whole[i : i + size] for i in range(0, len(whole), size))
    assert post_form(http, pieces).json()["text"] == blake2b(SOUND).hexdigest()
    assert bus.exchanges[-1].http_request.body == FILE + part("model", b"ears") + part("language", b"en") + END


def test_a_file_larger_than_what_is_held_passes_if_the_model_comes_first(bus: LocalBus, http: httpx.Client) -> None:
    large = part("file", b"x" * 20_000_000, '; filename="a.wav"')
    assert post_form(http, part("model", b"openai-chat/ears") + large + END).status_code == 200
    before = len(bus.exchanges)
    late = post_form(http, large + part("model", b"openai-chat/ears") + END)
    assert (late.status_code, code_of(late)) == (413, "request_too_large")
    assert len(bus.exchanges) == before


@pytest.mark.parametrize(
    "form",
    [
        FILE + END,
        part("model", b"openai-chat/ears") + FILE,
        part("model", b"openai-chat/ears") + part("model", b"other") + FILE + END,
        part("model", b"openai-chat/ears", '; filename="m"') + FILE + END,
        part("model", b"openai-chat/ears") + part("file", b"a\n--XyZ\nContent-Disposition: form-data", "") + END,
        part("model", b"openai-chat/ears") + FILE + END + part("model", b"other"),
        b"preamble\r\n" + part("model", b"openai-chat/ears") + FILE + END,
        part("model", b"openai-chat/ears").replace(b'name="model"', b"name=model") + FILE + END,
        part("model", b"openai-chat/ears").replace(b'name="model"', b'name="x"; name="model"') + FILE + END,
        part("model", b"openai-chat/ears").replace(b"\r\n\r\n", b"\nX: y\r\n\r\n") + FILE + END,
        b"--" + b"-" * 100_000,
        b"",
    ],
)
def test_a_form_that_two_readers_could_take_in_two_ways_is_refused(
    bus: LocalBus, http: httpx.Client, form: bytes
) -> None:
    finished = [exchange for exchange in bus.exchanges if exchange.status == 200]
    answer = post_form(http, form, "narrow")
    assert answer.status_code in (400, 403)
    assert [exchange for exchange in bus.exchanges if exchange.status == 200] == finished


def test_a_key_forwards_no_form_of_another_model(http: httpx.Client) -> None:
    answer = post_form(http, part("model", b"openai-chat/other") + FILE + END, "narrow")
    assert (answer.status_code, code_of(answer)) == (403, "model_not_allowed")


# --- files and batches -------------------------------------------------------------------------------------------


def test_a_file_is_its_tenants_own(bus: LocalBus, http: httpx.Client) -> None:
    with openai_client(bus) as client:
        file = client.files.create(file=("a.jsonl", b'{"a": 1}\n'), purpose="batch")
        assert client.files.retrieve(file.id).filename == "a.jsonl"
        assert client.files.content(file.id).content == b'{"a": 1}\n'
        with pytest.raises(openai.PermissionDeniedError):
            client.files.list()
    before = len(bus.exchanges)
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        theirs, none = (
            http.request(method, f"/v1/files/{one}{path}", headers=auth(KEYS["bob"])) for one in (file.id, "file-none")
        )
        assert (theirs.status_code, code_of(theirs)) == (none.status_code, code_of(none)) == (404, "not_found")
    stolen = {"input_file_id": file.id, "endpoint": "/v1/embeddings", "completion_window": "24h"}
    assert http.post("/v1/batches", json=stolen, headers=auth(KEYS["bob"])).status_code == 404
    assert len(bus.exchanges) == before
    with openai_client(bus, "boss") as client:
        assert file.id in [each.id for each in client.files.list()]
    with openai_client(bus) as client:
        assert client.files.delete(file.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file.id)


def test_a_run_names_no_file_of_another_tenant(bus: LocalBus, http: httpx.Client) -> None:
    with openai_client(bus) as client:
        file = client.files.create(file=("a.pdf", b"%PDF"), purpose="user_data")
    content = [{"type": "file", "file": {"file_id": file.id}}, {"type": "text", "text": "Read it."}]
    body = {"model": "openai-chat/text", "messages": [{"role": "user", "content": content}]}
    theirs = http.post("/v1/chat/completions", json=body, headers=auth(KEYS["bob"]))
    assert (theirs.status_code, code_of(theirs)) == (404, "not_found")
    assert http.post("/v1/chat/completions", json=body).status_code == 200


def test_a_session_takes_no_file_of_another_tenant(bus: LocalBus, http: httpx.Client) -> None:
    """Nor by what begins no run."""
    with openai_client(bus) as client:
        file = client.files.create(file=("a.pdf", b"%PDF"), purpose="user_data")
    request = {"model": "openai-chat/text"}
    part = {"type": "document", "source": {"type": "file", "file_id": file.id}}
    messages = [{"role": "user", "content": [part]}]
    items: list[dict[str, Any]] = [
        {"type": "configure", "request": request, "messages": messages},
        {"type": "message", "content": [part], "run": False},
        {"type": "rewrite", "messages": messages},
        {"type": "message", "messages": messages},
    ]
    ready = {"type": "configure", "request": request}
    for n, item in enumerate(items):
        for key, expected in (("bob", 404), ("ada", 200)):
            path = f"/sessions/of-{key}-{n}/events"
            if item["type"] != "configure":
                assert http.post(path, json={"item": ready}, headers=auth(KEYS[key])).status_code == 200
            answer = http.post(path, json={"item": item}, headers=auth(KEYS[key]))
            assert answer.status_code == expected, (item, answer.text)
            assert expected == 200 or code_of(answer) == "not_found"


def test_a_batch_and_its_answers_are_its_tenants_own(bus: LocalBus, http: httpx.Client) -> None:
    with openai_client(bus) as client:
        file = client.files.create(file=("a.jsonl", b"{}\n"), purpose="batch")
        made = client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
        batch = client.batches.retrieve(made.id)
    assert batch.output_file_id
    before = len(bus.exchanges)
    for one in (f"batches/{batch.id}", f"files/{batch.output_file_id}/content"):
        assert http.get(f"/v1/{one}", headers=auth(KEYS["bob"])).status_code == 404
        assert len(bus.exchanges) == before
    http.get(f"/v1/files/{batch.output_file_id}/content")
    assert len(bus.exchanges) == before + 1
    for key in ("narrow", "poor"):
        headers = {**auth(KEYS[key]), "x-tokenbus-provider": "openai-chat"}
        refused = http.post("/v1/batches", json={"endpoint": "/v1/embeddings"}, headers=headers)
        assert (refused.status_code, code_of(refused)) == (403, "batch_not_allowed")


def test_anthropics_client_uploads_and_runs_a_batch(bus: LocalBus) -> None:
    params: Any = {"model": "anthropic/text", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
    with anthropic_client(bus) as client:
        file = client.beta.files.upload(file=("a.txt", io.BytesIO(b"hello"), "text/plain"), betas=BETAS)
        assert client.beta.files.retrieve_metadata(file.id, betas=BETAS).filename == "a.txt"
        batch = client.messages.batches.create(requests=[{"custom_id": "one", "params": params}])
        sent = msgspec.json.decode(bus.exchanges[-1].http_request.body)
        assert sent == {"requests": [{"custom_id": "one", "params": {**params, "model": "text"}}]}
        assert [each.custom_id for each in client.messages.batches.results(batch.id)] == [batch.id]
    assert bus.exchanges[-1].http_request.path == f"/v1/messages/batches/{batch.id}/results"
    with anthropic_client(bus, "bob") as client, pytest.raises(anthropic.NotFoundError):
        client.messages.batches.retrieve(batch.id)


def test_openais_client_uploads_a_large_file_in_parts(bus: LocalBus, http: httpx.Client) -> None:
    with openai_client(bus) as client:
        made = client.uploads.create(filename="a.jsonl", purpose="batch", bytes=3, mime_type="text/plain")
        part = client.uploads.parts.create(made.id, data=b"{}\n")
        before = len(bus.exchanges)
        asked: Any = (("parts", {"files": {"data": b"x"}}), ("complete", {"json": {"part_ids": []}}), ("cancel", {}))
        for end, body in asked:
            stolen = http.post(f"/v1/uploads/{made.id}/{end}", **body, headers=auth(KEYS["bob"]))
            assert (stolen.status_code, code_of(stolen)) == (404, "not_found")
        assert len(bus.exchanges) == before
        done = client.uploads.complete(made.id, part_ids=[part.id])
        assert bus.exchanges[-1].http_request.path == f"/v1/uploads/{made.id}/complete"
        assert msgspec.json.decode(bus.exchanges[-1].http_request.body) == {"part_ids": [part.id]}
        assert done.file
        with openai_client(bus, "bob") as other, pytest.raises(openai.NotFoundError):
            other.files.content(done.file.id)
        assert len(bus.exchanges) == before + 1


def test_openais_client_uses_a_vector_store_of_its_own_files(bus: LocalBus, http: httpx.Client) -> None:
    bobs = auth(KEYS["bob"])
    with openai_client(bus) as client:
        file = client.files.create(file=("a.txt", b"a"), purpose="assistants").id
        store = client.vector_stores.create(name="mine", file_ids=[file]).id
        client.vector_stores.update(store, name="ours")
        client.vector_stores.search(store, query="x")
        client.vector_stores.files.create(store, file_id=file)
        client.vector_stores.files.retrieve(file, vector_store_id=store)
        client.vector_stores.files.content(file, vector_store_id=store)
        client.vector_stores.files.list(store)
        batch = client.vector_stores.file_batches.create(store, files=[{"file_id": file}]).id
        client.vector_stores.file_batches.retrieve(batch, vector_store_id=store)
        client.vector_stores.file_batches.list_files(batch, vector_store_id=store)
        client.vector_stores.files.delete(file, vector_store_id=store)
        assert bus.exchanges[-1].http_request.path == f"/v1/vector_stores/{store}/files/{file}"
        assert client.files.retrieve(file).id == file  # out of the store, and still there
        with pytest.raises(openai.PermissionDeniedError):
            client.vector_stores.list()
        before = len(bus.exchanges)
        for path, body in ((f"{store}/search", {"query": "x"}), (f"{store}/files", {"file_id": file}), (store, {})):
            theirs = http.post(f"/v1/vector_stores/{path}", json=body, headers=bobs)
            assert (theirs.status_code, code_of(theirs)) == (404, "not_found")
        for body in ({"file_ids": ["file-none", file]}, {"files": [{"file_id": file}]}):
            stolen = http.post("/v1/vector_stores", json=body, headers={**bobs, "x-tokenbus-provider": "openai-chat"})
            assert (stolen.status_code, code_of(stolen)) == (404, "not_found")
        tool = {"type": "file_search", "vector_store_ids": [store]}
        asked = {"model": "openai-responses/text", "input": "x", "tools": [tool]}
        run = http.post("/v1/responses", json=asked, headers=bobs)
        assert (run.status_code, code_of(run)) == (404, "not_found")
        assert len(bus.exchanges) == before
        assert client.vector_stores.delete(store).deleted
        with pytest.raises(openai.NotFoundError):
            client.vector_stores.retrieve(store)


@pytest.mark.parametrize("size", [0, 5, 9 * 2**20])
def test_googles_client_uploads_a_file_for_its_tenant_alone(bus: LocalBus, http: httpx.Client, size: int) -> None:
    content = bytes(range(256)) * (size // 256 + 1)
    with google_client(bus) as client:
        before = len(bus.exchanges)
        file = client.files.upload(file=io.BytesIO(content[:size]), config={"mime_type": "text/plain"})
        assert file.name
        _, *pieces = (each.http_request for each in bus.exchanges[before:])
        assert b"".join(each.body for each in pieces) == content[:size]
        assert client.files.get(name=file.name).mime_type == "text/plain"
        assert client.files.download(file=file.name) == content[:size][:4096]
        with google_client(bus, "bob") as other:
            for use in (other.files.get, other.files.delete):
                with pytest.raises(google.genai.errors.ClientError, match="404"):
                    use(name=file.name)
        parts = [{"fileData": {"fileUri": file.uri, "mimeType": "text/plain"}}]
        body = {"contents": [{"role": "user", "parts": parts}]}
        path = "/gemini/v1beta/models/gemini/text:generateContent"
        assert http.post(path, json=body, headers=auth(KEYS["bob"])).status_code == 404
        assert http.post(path, json=body).status_code == 200
        client.files.delete(name=file.name)
        with pytest.raises(google.genai.errors.ClientError, match="404"):
            client.files.get(name=file.name)


def test_an_upload_goes_on_only_with_its_ticket_and_while_its_key_is_valid(bus: LocalBus, http: httpx.Client) -> None:
    begin = {"x-tokenbus-provider": "gemini", "x-goog-upload-protocol": "resumable", "x-goog-upload-command": "start"}
    begin |= {"x-goog-upload-header-content-length": "3", "x-goog-upload-header-content-type": "text/plain"}
    begun = http.post("/gemini/upload/v1beta/files", json={"file": {}}, headers=begin)
    there = httpx.URL(begun.headers["x-goog-upload-url"])
    assert (there.host, there.port, there.path) == (
        httpx.URL(bus.gateway).host,
        httpx.URL(bus.gateway).port,
        "/gemini/upload/v1beta/files",
    )
    theirs = bus.exchanges[-1]
    assert "upload_id" not in theirs.http_request.query
    piece = {"x-goog-upload-command": "upload, finalize", "x-goog-upload-offset": "0"}
    before = len(bus.exchanges)
    with httpx.Client() as stranger:
        for url in (there.copy_with(query=None), there.copy_merge_params({"upload_id": "x" * 43})):
            assert stranger.post(url, content=b"abc", headers=piece).status_code == 401
        assert http.post(there.copy_with(query=None), content=b"abc", headers=piece).status_code == 404
        assert len(bus.exchanges) == before
        done = stranger.post(there, content=b"abc", headers=piece)
        assert (done.status_code, done.headers["x-goog-upload-status"]) == (200, "final")
    sent = bus.exchanges[-1].http_request
    assert (sent.body, "x-goog-api-key" in sent.headers) == (b"abc", False)
    name = done.json()["file"]["name"]
    assert http.get(f"/gemini/v1beta/{name}").status_code == 200
    assert http.get(f"/gemini/v1beta/{name}", headers=auth(KEYS["bob"])).status_code == 404


def test_googles_client_stores_content_and_runs_batches(bus: LocalBus, http: httpx.Client) -> None:
    said = [{"role": "user", "parts": [{"text": "x"}]}]
    with google_client(bus) as client, google_client(bus, "bob") as other:
        cache = client.caches.create(model="gemini/text", config={"contents": "x", "ttl": "60s"})  # type: ignore[arg-type]
        assert msgspec.json.decode(bus.exchanges[-1].http_request.body)["model"] == "models/text"
        assert cache.name
        client.caches.update(name=cache.name, config={"ttl": "90s"})
        assert bus.exchanges[-1].http_request.method == "PATCH"
        file = client.files.upload(file=io.BytesIO(b"{}\n"), config={"mime_type": "text/plain"})
        assert file.name
        inline = client.batches.create(model="gemini/text", src=[{"contents": said, "model": "other"}])  # type: ignore[list-item]
        sent = msgspec.json.decode(bus.exchanges[-1].http_request.body)
        assert sent["batch"]["inputConfig"]["requests"]["requests"][0]["request"]["model"] == "models/text"
        batch = client.batches.create(model="gemini/text", src=file.name)
        assert inline.name
        assert batch.name
        made = client.batches.get(name=batch.name)
        assert made.dest
        assert made.dest.file_name
        before = len(bus.exchanges)
        for use in (
            lambda: other.caches.get(name=str(cache.name)),
            lambda: other.caches.delete(name=str(cache.name)),
            lambda: other.batches.get(name=str(batch.name)),
            lambda: other.batches.cancel(name=str(batch.name)),
            lambda: other.batches.create(model="gemini/text", src=str(file.name)),
            lambda: other.files.download(file=str(made.dest and made.dest.file_name)),
        ):
            with pytest.raises(google.genai.errors.ClientError, match="404"):
                use()
        part = {"file_data": {"file_uri": file.uri}}
        for body in (
            {"batch": {"input_config": {"file_name": file.name}}},
            {"batch": {"input_config": {"requests": {"requests": [{"request": {"contents": [{"parts": [part]}]}}]}}}},
        ):
            path = "/gemini/v1beta/models/gemini/text:batchGenerateContent"
            raw = msgspec.json.encode(body).replace(b"file_", b"\\u0066ile_")
            assert http.post(path, content=raw, headers=auth(KEYS["bob"])).status_code == 404
        assert len(bus.exchanges) == before
        client.caches.delete(name=cache.name)
        client.batches.delete(name=batch.name)
    narrow = http.post(
        "/gemini/v1beta/models/gemini/other:batchGenerateContent", json={"batch": {}}, headers=auth(KEYS["narrow"])
    )
    assert (narrow.status_code, narrow.json()["error"]["status"]) == (403, "PERMISSION_DENIED")
    for path, body in (("/gemini/v1beta/cachedContents", {"model": "models/gemini/text"}), ("/v1/vector_stores", {})):
        headers = {**auth(KEYS["poor"]), "x-tokenbus-provider": "openai-chat"}
        assert http.post(path, json=body, headers=headers).status_code == 403


def test_the_models_of_a_provider_are_listed_for_who_names_it(bus: LocalBus, http: httpx.Client) -> None:
    assert http.get("/v1/models", headers={"x-tokenbus-provider": "openai-chat"}).json()["data"] == []
    assert bus.exchanges[-1].http_request.path == "/v1/models"
    unknown = http.get("/v1/models", headers={"x-tokenbus-provider": "nobody"})
    assert (unknown.status_code, code_of(unknown)) == (404, "provider_not_found")
    other = http.get("/v1/models", headers={"x-tokenbus-provider": "anthropic", **auth(KEYS["narrow"])})
    assert (other.status_code, code_of(other)) == (403, "provider_not_allowed")


@pytest.mark.parametrize("one", ["..%2f..%2fadmin", "..", "%2e%2e", "a%252fb", "a%00b", "x" * 500, "a b"])
def test_no_id_leads_to_another_path(bus: LocalBus, http: httpx.Client, one: str) -> None:
    before = len(bus.exchanges)
    for key in ("ada", "boss"):
        url = httpx.URL(bus.gateway).copy_with(raw_path=f"/v1/files/{one}/content".encode())
        answer = http.get(url, headers=auth(KEYS[key]))
        assert answer.status_code in (400, 404)
    assert [each.http_request.path for each in bus.exchanges[before:]] in (
        [],
        [f"/v1/files/{one}/content"],
        [f"/v1/files/{one.replace(' ', '%20')}/content"],
    )


def test_each_forwarded_path_passes_the_limits_of_its_key(bus: LocalBus, http: httpx.Client) -> None:
    limited = auth(KEYS["limited"])
    http.post("/v1/embeddings", json={"model": "openai-chat/text", "input": "x"}, headers=limited)
    before = len(bus.exchanges)
    for method, route in sorted(forwarded_routes()):
        path = route.replace("{model:path}", "gemini/text").replace("{id}", "none")
        family = (
            {"anthropic-version": "2023-06-01"}
            if any(each in path for each in ("messages", "anthropic", "v1/v1"))
            else {}
        )
        model = "anthropic/text" if family else "openai-responses/text"
        params = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
        body: Json = {"contents": [], "requests": [{"params": params}], "input": "x", **params}
        body = {"contents": [], "model": "gemini/text"} if "gemini" in path or "v1beta" in path else body
        if "upload/v1" in path:
            answer = http.request(method, path, json={}, headers={**limited, "x-tokenbus-provider": "gemini"})
        elif path.endswith(("/files", "/parts")) and "vector_stores" not in path:
            headers = {"content-type": f"multipart/form-data; boundary={BOUND}", "x-tokenbus-provider": "anthropic"}
            headers["x-tokenbus-provider"] = "anthropic" if family else "openai-chat"
            answer = http.request(method, path, content=FILE + END, headers={**limited, **family, **headers})
        else:
            answer = http.request(method, path, json=body, headers={**limited, **family})
        named = "{id}" in route
        assert answer.status_code == (404 if named else 429), (method, route, answer.text)
    assert len(bus.exchanges) == before


WORDS: Json = {"model": "openai-chat/text", "input": "one two three"}
CONTENT: Json = {"parts": [{"text": "one two three"}]}
EDITED = part("image", SOUND, '; filename="a.png"') + END
OF_MODEL = "/gemini/v1beta/models/gemini/text"
METERED: dict[str, tuple[Json | bytes, tuple[int, int] | None]] = {
    "/v1/embeddings": (WORDS, (3, 0)),
    f"{OF_MODEL}:embedContent": ({"content": CONTENT}, None),
    f"{OF_MODEL}:batchEmbedContents": ({"requests": [{"model": "models/text", "content": CONTENT}]}, None),
    "/v1/responses/compact": ({**WORDS, "model": "openai-responses/text"}, (3, 2)),
    "/v1/audio/speech": ({**WORDS, "voice": "alloy"}, None),
    "/v1/audio/transcriptions": (part("model", b"openai-chat/ears") + FILE + END, (7, 2)),
    "/v1/audio/translations": (part("model", b"openai-chat/ears") + FILE + END, (7, 2)),
    "/v1/images/edits": (part("model", b"openai-chat/brush") + part("prompt", b"a hat") + EDITED, (5, 9)),
    "/v1/images/variations": (part("model", b"openai-chat/brush") + EDITED, (5, 9)),
}
"""A request for each path that costs tokens, with the counts of its answer; None: it has none."""


async def test_each_metered_call_counts_the_tokens_of_its_answer_or_what_was_estimated(bus: LocalBus) -> None:
    metered = [path for path in TABLE if path.is_metered]
    assert len(metered) == len(METERED)
    done, before = 0, (0, 0)
    async with Server(bus.url) as server, httpx.AsyncClient(base_url=bus.gateway, timeout=60) as http:

        async def counted() -> ClientSpend | None:
            [spend] = await read_spend(server, Keys(), ["metered"])
            return spend if spend.total.runs == done and spend.reserved == 0 else None

        for path, (body, counts) in METERED.items():
            done += 1
            [row] = (one for one in metered if path.endswith(one.path.replace("/models/{model}", "")))
            content = body if isinstance(body, bytes) else msgspec.json.encode(body)
            kind = f"multipart/form-data; boundary={BOUND}" if isinstance(body, bytes) else "application/json"
            answer = await http.post(path, content=content, headers={**auth(KEYS["metered"]), "content-type": kind})
            assert answer.status_code == 200, (path, answer.text)
            spend = await eventually(counted)
            assert spend
            used = (spend.total.input - before[0], spend.total.output - before[1])
            before = (spend.total.input, spend.total.output)
            estimated = used[0] > 0 and used[1] == (10 if row.has_output else 0)
            assert used == counts if counts else estimated, (path, used, answer.text[-300:])
            assert spend.total.cost == pytest.approx(sum(before) / 1e6), path


NO_OBJECT = (b"", b"no json", b"[]", b"5", b'{"model": ', b"\xff\xfe", b"[" * 50_000, b'{"model": "\xff"}')


def test_each_forwarded_path_refuses_a_body_that_is_none_of_its_form_in_the_words_of_its_api(
    bus: LocalBus, http: httpx.Client
) -> None:
    before = len(bus.exchanges)
    http.headers.update(auth(KEYS["boss"]))
    for row in TABLE:
        provider = {"openai": "openai-chat", "anthropic": "anthropic", "gemini": "gemini"}[row.family]
        headers = {"x-tokenbus-provider": provider, **({row.header: "0"} if row.header else {})}
        path = row.below(BASES[row.family][0]).replace("{model}", "gemini/text")
        path = path.format(id="none", file="none", batch="none")
        headers["content-type"] = "application/json"
        for body in NO_OBJECT if row.body != "none" else ():
            answer = http.request(row.method, path, content=body, headers=headers)
            assert answer.status_code in (400, 404), (row, body[:20], answer.text)
            error = answer.json()["error"]
            assert error["message"], (row, body[:20])
            assert {"openai": "param", "anthropic": "details", "gemini": "status"}[row.family] in error, (row, error)
    assert len(bus.exchanges) == before


def test_what_a_deployment_drops_of_a_forwarded_request_is_left_out_and_named(
    bus: LocalBus, http: httpx.Client
) -> None:
    body = {**WORDS, "model": "openai-responses/text", "prompt": {"id": "pmpt_1"}}
    answer = http.post("/v1/responses/compact", json=body)
    assert (answer.status_code, answer.headers["x-tokenbus-left-out"]) == (200, "prompt")
    assert "prompt" not in msgspec.json.decode(bus.exchanges[-1].http_request.body)
    kept = http.post("/v1/responses/compact", json={**body, "conversation": "conv_1"})
    assert (kept.status_code, kept.json()["error"]["param"]) == (400, "conversation")
