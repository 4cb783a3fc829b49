"""Which blobs become files of a provider's, by real uploads to its file API; and all that can go wrong with that."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from hashlib import sha256
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from tests.services.fetcher.blob_store import MemoryBlobs
from tests.services.fetcher.calls.test_media_send import Written
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.errors import BlobUnavailable, RequestInvalid, SettingsError
from tokenbus.events.quirks import ApiName
from tokenbus.events.requests import (
    BlobSource,
    DocumentPart,
    Generate,
    ImagePart,
    Message,
    TextPart,
    Tool,
    ToolCallPart,
    ToolResultPart,
)
from tokenbus.providers.file_api import FileCall
from tokenbus_services.endpoints.endpoint import Endpoint
from tokenbus_services.fetcher.calls.provider_call import FilesLost, fetch
from tokenbus_services.fetcher.request_media import TurnMedia
from tokenbus_services.fetcher.uploads import upload as upload_module
from tokenbus_services.fetcher.uploads.plan import UploadMetrics, Uploads
from tokenbus_services.fetcher.uploads.upload import UploadedFiles, UploadFailed
from tokenbus_services.media.blob_cache import RecentBlobs
from tokenbus_services.media.locate import MediaBody, MediaFailed
from tokenbus_services.mock_provider import MockProvider, Reply, Script, Status, Turn
from tokenbus_services.settings import MediaSettings, ProviderSettings, UploadSettings
from tokenbus_services.settings.file import read_file

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 40
PDF = b"%PDF-1.7 \r\n--\r\n" + b"page" * 3000
BASE_PATHS: dict[ApiName, str] = {"anthropic": "", "openai-chat": "/v1", "openai-responses": "/v1", "gemini": "/v1beta"}
TOOL = Tool(name="look")


class Bench:
    """One or two fetchers' ways from a request to its body, over one provider, one server and one blob store."""

    def __init__(self, provider: MockProvider, server: Server, keys: Keys) -> None:
        self.provider = provider
        self.blob_store = MemoryBlobs()
        self.endpoints: list[Endpoint] = []
        self._server = server
        self._keys = keys
        self.media = self.fetcher()

    def fetcher(self) -> TurnMedia:
        files = UploadedFiles(self._server, self._keys)
        return TurnMedia(RecentBlobs(self.blob_store, 0), Uploads(files, UploadMetrics(CollectorRegistry())))

    def endpoint(self, api: ApiName = "openai-responses", *, key: str = "", **media: Any) -> Endpoint:
        settings = ProviderSettings(
            api=api,
            base_url=self.provider.url + BASE_PATHS[api],
            api_key_env="KEY" if key else "",
            media=MediaSettings(**media),
            uploads=UploadSettings(min_bytes=1000),
        )
        self.endpoints.append(Endpoint("p", settings, {"KEY": key}))
        return self.endpoints[-1]

    def image(self, content: bytes = PNG) -> ImagePart:
        return ImagePart(source=BlobSource(blob_id=self.blob_store.put(content, "image/png"), media_type="image/png"))

    def document(self, content: bytes = PDF) -> DocumentPart:
        blob_id = self.blob_store.put(content, "application/pdf")
        return DocumentPart(source=BlobSource(blob_id=blob_id, media_type="application/pdf"))

    @property
    def uploads(self) -> int:
        return len(self.provider.files.files)

    @property
    def asked(self) -> int:
        """Calls of file APIs, those that failed too."""
        return len(self.provider.requests)

    async def sent(self, endpoint: Endpoint, request: Generate, **more: Any) -> bytes:
        """The body that would go out; what it names is there."""
        media: TurnMedia = more.pop("media", self.media)
        built, body = await media.build(endpoint, request, more.pop("history", []), **more)
        whole = built.call.body if body is None else b"".join([piece async for piece in body])
        assert body is None or len(whole) == body.size
        assert all(file_id.encode() in whole for file_id in built.call.files)
        return whole


@pytest.fixture
async def bench(server: Server, keys: Keys) -> AsyncIterator[Bench]:
    async with MockProvider() as provider:
        made = Bench(provider, server, keys)
        yield made
        for endpoint in made.endpoints:
            await endpoint.close()


def request_with(*parts: Any, tools: bool = False) -> Generate:
    content = [TextPart(text="Look:"), *parts]
    tool = [TOOL] if tools else []
    return Generate(provider="p", model="m", messages=[Message(role="user", content=content)], tools=tool)


def is_inside(content: bytes, body: bytes) -> bool:
    return b64encode(content) in body


# --- when -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", BASE_PATHS)
async def test_a_run_with_tools_uploads_at_once_and_only_once_and_the_file_is_the_blob(
    bench: Bench, api: ApiName
) -> None:
    endpoint = bench.endpoint(api)
    request = request_with(bench.document(), tools=True)
    bodies = [await bench.sent(endpoint, request) for _ in range(3)]
    [file] = bench.provider.files.files.values()
    assert (file.sha256, file.media_type) == (sha256(PDF).hexdigest(), "application/pdf")
    for body in bodies:
        assert file.file_id.encode() in body
        assert not is_inside(PDF, body)


async def test_without_tools_a_blob_is_uploaded_when_it_is_sent_a_second_time_by_whichever_fetcher(
    bench: Bench,
) -> None:
    endpoint, request, another = bench.endpoint(), request_with(bench.image()), bench.fetcher()
    assert is_inside(PNG, await bench.sent(endpoint, request))
    assert bench.uploads == 0
    for media in (another, bench.media, another):
        assert not is_inside(PNG, await bench.sent(endpoint, request, media=media))
    assert bench.uploads == 1


async def test_a_later_turn_of_a_run_uploads_what_its_tools_brought(bench: Bench) -> None:
    call = Message(role="assistant", content=[ToolCallPart(tool_id="c", tool_name="look", arguments="{}")])
    result = Message(role="tool", content=[ToolResultPart(tool_id="c", content=[bench.image()])])
    body = await bench.sent(bench.endpoint("anthropic"), request_with(), history=[call, result])
    assert not is_inside(PNG, body)
    assert bench.uploads == 1


async def test_small_blobs_and_images_for_chat_completions_and_what_the_model_made_go_inside(bench: Bench) -> None:
    small, made = PNG[:999], PNG + b"made"
    assert is_inside(small, await bench.sent(bench.endpoint(), request_with(bench.image(small), tools=True)))
    assert is_inside(PNG, await bench.sent(bench.endpoint("openai-chat"), request_with(bench.image(), tools=True)))
    own = Message(role="assistant", content=[TextPart(text="Here"), bench.image(made)])
    request = request_with(tools=True)
    assert is_inside(made, await bench.sent(bench.endpoint("gemini"), request, history=[own]))
    assert bench.asked == 0


async def test_nothing_is_uploaded_if_the_provider_has_no_uploads_table(bench: Bench) -> None:
    settings = ProviderSettings(api="gemini", base_url=bench.provider.url + "/v1beta", api_key_env="")
    endpoint = Endpoint("p", settings, {})
    bench.endpoints.append(endpoint)
    for _ in range(3):
        assert is_inside(PNG, await bench.sent(endpoint, request_with(bench.image(), tools=True)))
    assert bench.asked == 0


async def test_what_does_not_fit_into_a_request_is_uploaded_the_largest_first(bench: Bench) -> None:
    large, small = PNG * 3, PNG + b"other"
    endpoint = bench.endpoint(request_bytes=len(PNG) * 3)
    body = await bench.sent(endpoint, request_with(bench.image(small), bench.image(large)))
    assert (is_inside(small, body), is_inside(large, body)) == (True, False)
    assert bench.uploads == 1


async def test_files_are_shared_by_those_of_one_key_alone(bench: Bench) -> None:
    request = request_with(bench.image(), tools=True)
    for key in ("key-of-one", "key-of-another", "key-of-one"):
        await bench.sent(bench.endpoint(key=key), request)
    assert bench.uploads == 2


async def test_a_film_is_named_once_it_is_processed(bench: Bench) -> None:
    bench.provider.files.processing = 2
    await bench.sent(bench.endpoint("gemini"), request_with(bench.document(), tools=True))
    assert [exchange.http_request.method for exchange in bench.provider.requests] == ["POST", "POST", "GET", "GET"]


# --- what goes wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [Status(status=500), Status(status=429, headers={"retry-after": "0"})])
async def test_an_upload_is_retried_if_a_call_would_be(bench: Bench, fault: Status) -> None:
    bench.provider.files.fail_next_uploads(fault)
    assert not is_inside(PNG, await bench.sent(bench.endpoint(), request_with(bench.image(), tools=True)))
    assert (bench.asked, bench.uploads) == (2, 1)


@pytest.mark.parametrize(
    ("faults", "uploads_expected"),
    [
        ([Status(status=503), Status(status=503)], 2),
        ([Status(status=429, headers={"retry-after": "60"})], 1),
        ([Status(status=404)], 1),
        ([Status(status=403)], 1),
    ],
)
async def test_after_a_failed_upload_media_go_inline_and_uploads_pause(
    bench: Bench, faults: list[Status], uploads_expected: int
) -> None:
    bench.provider.files.fail_next_uploads(*faults)
    endpoint = bench.endpoint()
    for content in (PNG, PNG, PNG + b"other"):
        assert is_inside(content, await bench.sent(endpoint, request_with(bench.image(content), tools=True)))
    assert (bench.asked, bench.uploads) == (uploads_expected, 0)


async def test_a_refused_file_does_not_affect_other_files(bench: Bench) -> None:
    bench.provider.files.fail_next_uploads(Status(status=413))
    endpoint, other = bench.endpoint(), PNG + b"other"
    for _ in range(2):
        assert is_inside(PNG, await bench.sent(endpoint, request_with(bench.image(), tools=True)))
    assert not is_inside(other, await bench.sent(endpoint, request_with(bench.image(other), tools=True)))
    assert (bench.asked, bench.uploads) == (2, 1)


async def test_what_fits_nowhere_else_ends_the_attempt_with_the_uploads_error(bench: Bench) -> None:
    bench.provider.files.fail_next_uploads(Status(status=503), Status(status=503))
    with pytest.raises(UploadFailed) as e:
        await bench.sent(bench.endpoint(request_bytes=len(PNG)), request_with(bench.image()))
    error = e.value.error
    assert (error.kind, error.retryable, error.where) == ("overloaded", True, "messages[0].content[1]")
    with pytest.raises(RequestInvalid, match="with its media"):
        await bench.sent(bench.endpoint("openai-chat", request_bytes=len(PNG)), request_with(bench.image()))


async def test_a_lost_file_is_sent_inline_and_uploaded_again_the_next_time(bench: Bench) -> None:
    endpoint, request = bench.endpoint(), request_with(bench.image(), bench.document(), tools=True)
    await bench.sent(endpoint, request)
    lost = next(name for name, file in bench.provider.files.files.items() if file.media_type == "image/png")
    body = await bench.sent(endpoint, request, lost=[lost])
    assert is_inside(PNG, body)
    assert is_inside(PDF, body)  # its file may be gone too
    assert bench.uploads == 2
    body = await bench.sent(endpoint, request)
    assert bench.uploads == 3
    assert lost.encode() not in body


async def test_a_lost_file_too_large_to_inline_is_uploaded_again_at_once(bench: Bench) -> None:
    endpoint, request = bench.endpoint(request_bytes=len(PNG)), request_with(bench.image())
    await bench.sent(endpoint, request)
    [lost] = bench.provider.files.files
    assert lost.encode() not in await bench.sent(endpoint, request, lost=[lost])
    assert bench.uploads == 2


async def test_turns_that_want_the_same_blob_at_once_share_its_upload(bench: Bench) -> None:
    endpoint, request = bench.endpoint(), request_with(bench.image(), tools=True)
    bodies = await asyncio.gather(*(bench.sent(endpoint, request) for _ in range(8)))
    assert bench.uploads == 1
    assert len(set(bodies)) == 1


async def test_two_fetchers_that_upload_at_once_do_no_harm(bench: Bench) -> None:
    endpoint, request, another = bench.endpoint(), request_with(bench.image(), tools=True), bench.fetcher()
    sending = (bench.sent(endpoint, request, media=media) for media in (bench.media, another))
    for body in await asyncio.gather(*sending):
        assert any(file_id.encode() in body for file_id in bench.provider.files.files)
    assert bench.uploads <= 2
    before = bench.uploads
    await bench.sent(endpoint, request)
    assert bench.uploads == before


@pytest.mark.parametrize(
    ("fault", "lost"),
    [
        (Status(status=404, body=b'{"error": {"message": "no file with id file-1"}}'), True),
        (Status(status=400, body=b'{"error": {"message": "max_output_tokens is too large"}}'), False),
        (Status(status=404, body=b""), False),
        (Status(status=500, body=b"file-1"), False),
    ],
)
async def test_an_error_without_a_file_is_passed_on_and_an_error_with_one_leaves_nothing_written(
    fault: Status, lost: bool
) -> None:
    writer: Any = Written()
    script = Script(name="m", turns=(Turn(says=Reply(text="Hi"), fault=fault),))
    async with MockProvider([script]) as provider:
        settings = ProviderSettings(api="openai-responses", base_url=f"{provider.url}/v1", api_key_env="")
        endpoint = Endpoint("p", settings, {})
        request = request_with()
        call = msgspec.structs.replace(endpoint.build(request, []).call, files=("file-1",))
        calling = fetch(endpoint, request, call, writer=writer, deadline=None)
        if lost:
            with pytest.raises(FilesLost) as e:
                await calling
            assert e.value.file_ids == ("file-1",)
        else:
            await calling
        await endpoint.close()
    if lost:
        assert writer.items == []
        return
    opened, *data, ended = writer.items
    assert (opened.status, b"".join(item.data for item in data)) == (fault.status, fault.body)
    assert ended.error is None


class Halting(MemoryBlobs):
    """Gives the beginning of a blob; then it breaks off, or waits to continue."""

    def __init__(self, failure: BlobUnavailable | None = None) -> None:
        super().__init__()
        self.proceed = asyncio.Event()
        self._breaks_off = failure

    async def chunks(self, blob_id: str) -> AsyncGenerator[bytes]:
        content = self.contents[blob_id][0]
        self.open_readers += 1
        try:
            yield content[:1000]
            if self._breaks_off:
                raise self._breaks_off
            await self.proceed.wait()
            yield content[1000:]
        finally:
            self.open_readers -= 1


@asynccontextmanager
async def two_turns(bench: Bench, blob_store: Halting) -> AsyncIterator[list[asyncio.Task[bytes]]]:
    """Two turns wait for one upload, which halts half-way."""
    bench.blob_store = blob_store
    bench.media = bench.fetcher()
    endpoint, request = bench.endpoint(), request_with(bench.image(), tools=True)
    turns = [asyncio.create_task(bench.sent(endpoint, request)) for _ in range(2)]
    await eventually(lambda: blob_store.open_readers == 1)
    try:
        yield turns
    finally:
        for turn in turns:
            turn.cancel()
        await asyncio.gather(*turns, return_exceptions=True)


async def test_an_upload_continues_for_the_requests_that_still_need_it(bench: Bench) -> None:
    blob_store = Halting()
    async with two_turns(bench, blob_store) as (one, other):
        one.cancel()
        with pytest.raises(asyncio.CancelledError):
            await one
        blob_store.proceed.set()
        assert not is_inside(PNG, await other)
    assert bench.uploads == 1


async def test_an_upload_that_no_request_needs_any_more_is_cancelled(bench: Bench) -> None:
    blob_store = Halting()
    async with two_turns(bench, blob_store) as turns:
        for turn in turns:
            turn.cancel()
        await asyncio.gather(*turns, return_exceptions=True)
        assert blob_store.open_readers == 0
    await eventually(lambda: bench.provider.open_connections == 0)
    assert bench.uploads == 0


async def test_an_upload_that_drips_is_given_up_and_the_media_go_inside(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    over = asyncio.Event()

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while not over.is_set():  # the system may hold megabytes that were sent before
                await reader.readexactly(1024)
                await asyncio.sleep(0.01)
        writer.close()

    monkeypatch.setattr(upload_module, "MAX_REQUEST_S", 0.0)
    monkeypatch.setattr(upload_module, "LEAST_BYTES_PER_S", 2**40)
    large = PNG + bytes(16 * 2**20)
    async with await asyncio.start_server(drip, "127.0.0.1", 0, limit=1024) as slow:
        settings = ProviderSettings(
            api="openai-responses",
            base_url=f"http://127.0.0.1:{slow.sockets[0].getsockname()[1]}/v1",
            api_key_env="",
            connect_timeout_s=0.2,
            first_event_timeout_s=0.2,
            uploads=UploadSettings(min_bytes=1000),
        )
        bench.endpoints.append(Endpoint("p", settings, {}))
        assert is_inside(large, await bench.sent(bench.endpoints[-1], request_with(bench.image(large), tools=True)))
        over.set()
    assert capsys.readouterr().out.count("upload_too_slow") == 1  # it is not tried again


async def test_a_store_that_breaks_off_ends_the_attempt_as_it_does_for_a_call(bench: Bench) -> None:
    bench.blob_store = Halting(BlobUnavailable("blobs", "broke off"))
    bench.media = bench.fetcher()
    with pytest.raises(MediaFailed) as e:
        await bench.sent(bench.endpoint(), request_with(bench.image(), tools=True))
    assert (e.value.error.code, e.value.error.retryable) == ("blob_unavailable", True)
    assert e.value.error.where == "messages[0].content[1]"


async def test_an_outage_of_the_server_loses_the_file_and_not_the_run(bench: Bench, keys: Keys) -> None:
    async with Server("redis://127.0.0.1:1") as away:
        media = TurnMedia(
            RecentBlobs(bench.blob_store, 0), Uploads(UploadedFiles(away, keys), UploadMetrics(CollectorRegistry()))
        )
        assert is_inside(PNG, await bench.sent(bench.endpoint(), request_with(bench.image(), tools=True), media=media))
    assert bench.asked == 0


async def test_a_content_goes_to_no_address_but_the_providers_and_a_key_to_none_but_its_own(bench: Bench) -> None:
    endpoint = bench.endpoint("gemini", key="key-of-one")
    body = MediaBody([b"content"])
    own = endpoint.file_request(FileCall(path=f"{bench.provider.url}/upload/v1beta/files?upload_id=1"), body)
    assert "key-of-one" not in str(own.headers)
    assert own.url.query == b"upload_id=1"
    assert endpoint.file_request(FileCall(path="/v1beta/files/x"), body).headers["x-goog-api-key"] == "key-of-one"
    for url in ("http://169.254.169.254/latest", "https://127.0.0.1/x", "http://example.org:1/x"):
        with pytest.raises(RequestInvalid, match="another address"):
            endpoint.file_request(FileCall(path=url), body)


async def test_the_beta_of_files_does_not_take_the_place_of_betas_in_the_settings(bench: Bench) -> None:
    settings = ProviderSettings(
        api="anthropic",
        base_url=bench.provider.url,
        api_key_env="",
        headers={"Anthropic-Beta": "one-2025-01-01"},
        uploads=UploadSettings(min_bytes=1000),
    )
    endpoint = Endpoint("p", settings, {})
    bench.endpoints.append(endpoint)
    built, body = await bench.media.build(endpoint, request_with(bench.image(), tools=True), [])
    request = endpoint.request(built.call, body)
    assert request.headers["anthropic-beta"] == "one-2025-01-01,files-api-2025-04-14"
    assert bench.uploads == 1


async def test_an_api_that_cannot_name_files_has_no_uploads_to_switch_on(tmp_path: Any) -> None:
    path = tmp_path / "tokenbus.toml"
    path.write_text('[providers.p]\napi = "openai-images"\nuploads = {}\n')
    with pytest.raises(SettingsError, match="cannot refer to uploaded files"):
        read_file(path)
