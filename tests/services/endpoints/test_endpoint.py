"""A configured provider as it is called: where, with what key, in what form; vendors of docs/guides/providers.md."""

from __future__ import annotations

import asyncio
import re
import sys
import types
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import msgspec
import pytest

from tokenbus.errors import RequestInvalid, SettingsError
from tokenbus.events.requests import Base64Source, Generate, ImagePart, Message, TextPart, Thinking
from tokenbus.providers.auth import Token, TokenAuth
from tokenbus.providers.file_api import FileCall
from tokenbus_services.endpoints.endpoint import Endpoint, Providers
from tokenbus_services.media.locate import MediaBody
from tokenbus_services.redaction.events import RedactedEvents
from tokenbus_services.redaction.redactor import LEARNED
from tokenbus_services.settings import ProviderSettings, Settings

DOCS = Path(__file__).parents[3] / "docs" / "guides" / "providers.md"
SNIPPETS = re.findall(r"^```toml\n(.*?)^```", DOCS.read_text(), re.DOTALL | re.MULTILINE)
DOCUMENTED = {
    name: provider
    for snippet in SNIPPETS
    for name, provider in msgspec.toml.decode(snippet, type=Settings).providers.items()
    if provider.auth is None  # what those send, tests/examples/test_auth.py looks at
}
LOCAL = ("", "", "")
"""No key."""
CALLED: dict[str, tuple[str, tuple[str, str, str]]] = {
    "NAME": ("https://api.example.org/v1/chat?api-version=1", ("NAME_API_KEY", "api-key", "secret")),
    "azure": (
        "https://your-resource.openai.azure.com/openai/v1/chat/completions",
        ("AZURE_OPENAI_API_KEY", "api-key", "secret"),
    ),
    "azure-dated": (
        "https://your-resource.openai.azure.com/openai/deployments/m/chat/completions?api-version=2024-10-21",
        ("AZURE_OPENAI_API_KEY", "api-key", "secret"),
    ),
    "groq": ("https://api.groq.com/openai/v1/chat/completions", ("GROQ_API_KEY", "authorization", "Bearer secret")),
    "deepseek": ("https://api.deepseek.com/chat/completions", ("DEEPSEEK_API_KEY", "authorization", "Bearer secret")),
    "xai": ("https://api.x.ai/v1/responses", ("XAI_API_KEY", "authorization", "Bearer secret")),
    "mistral": ("https://api.mistral.ai/v1/chat/completions", ("MISTRAL_API_KEY", "authorization", "Bearer secret")),
    "openrouter": (
        "https://openrouter.ai/api/v1/chat/completions",
        ("OPENROUTER_API_KEY", "authorization", "Bearer secret"),
    ),
    "zai": ("https://api.z.ai/api/paas/v4/chat/completions", ("ZAI_API_KEY", "authorization", "Bearer secret")),
    "alibaba": (
        "https://dashscope-intl.aliyuncs.com/compatible-mode/v1/chat/completions",
        ("DASHSCOPE_API_KEY", "authorization", "Bearer secret"),
    ),
    "moonshot": ("https://api.moonshot.ai/v1/chat/completions", ("MOONSHOT_API_KEY", "authorization", "Bearer secret")),
    "huggingface": (
        "https://router.huggingface.co/v1/chat/completions",
        ("HF_TOKEN", "authorization", "Bearer secret"),
    ),
    "cloudflare": (
        "https://api.cloudflare.com/client/v4/accounts/YOUR-ACCOUNT/ai/v1/chat/completions",
        ("CLOUDFLARE_API_TOKEN", "authorization", "Bearer secret"),
    ),
    "writer": ("https://api.writer.com/v1/chat", ("WRITER_API_KEY", "authorization", "Bearer secret")),
    "claude-bedrock": (
        "https://bedrock-runtime.us-east-1.amazonaws.com/model/m/invoke-with-response-stream",
        ("AWS_BEARER_TOKEN_BEDROCK", "authorization", "Bearer secret"),
    ),
    "claude-vertex": (
        "https://aiplatform.googleapis.com/v1/projects/YOUR-PROJECT/locations/global/publishers/anthropic/models/m"
        ":streamRawPredict",
        ("VERTEX_TOKEN", "authorization", "Bearer secret"),
    ),
    "vertex": (
        "https://aiplatform.googleapis.com/v1/publishers/google/models/m:streamGenerateContent?alt=sse",
        ("VERTEX_API_KEY", "x-goog-api-key", "secret"),
    ),
    "ollama": ("http://localhost:11434/v1/chat/completions", LOCAL),
    "vllm": ("http://localhost:8000/v1/chat/completions", LOCAL),
    "lmstudio": ("http://localhost:1234/v1/chat/completions", LOCAL),
    "gpustack": ("http://your-server/v1/chat/completions", ("GPUSTACK_API_KEY", "authorization", "Bearer secret")),
    "gpustack-messages": ("http://your-server/v1/messages", ("GPUSTACK_API_KEY", "authorization", "Bearer secret")),
}
"""Where each goes for model `m`, and with which key in which header."""
KEY_HEADERS = ("authorization", "api-key", "x-api-key", "x-goog-api-key")


def generate_for(model: str = "m", **fields: Any) -> Generate:
    return Generate(provider="p", model=model, messages=[Message(role="user", content="Hi")], **fields)


@asynccontextmanager
async def endpoint(settings: ProviderSettings, env: dict[str, str]) -> AsyncIterator[Endpoint]:
    made = Endpoint("p", settings, env)
    try:
        yield made
    finally:
        await made.close()


async def call(settings: ProviderSettings, request: Generate, **env: str) -> httpx.Request:
    async with endpoint(settings, env) as made:
        return made.request(made.build(request, []).call)


@pytest.mark.parametrize("name", [*DOCUMENTED])
async def test_a_documented_vendor_is_called_at_its_own_url_with_its_key(name: str) -> None:
    url, (variable, header, value) = CALLED[name]
    settings = DOCUMENTED[name]
    sent = await call(settings, generate_for(), **({variable: "secret"} if variable else {}))
    assert sent.url == httpx.URL(url)
    assert {key: sent.headers[key] for key in KEY_HEADERS if key in sent.headers} == ({header: value} if header else {})
    assert (settings.api_key_env or "") == variable


def test_the_documents_and_this_test_name_the_same_vendors() -> None:
    assert set(DOCUMENTED) == set(CALLED)


@pytest.mark.parametrize(
    ("name", "on", "off"),
    [
        ("deepseek", {"thinking": {"type": "enabled"}, "reasoning_effort": "low"}, {"thinking": {"type": "disabled"}}),
        ("zai", {"thinking": {"type": "enabled"}, "reasoning_effort": "low"}, {"thinking": {"type": "disabled"}}),
        ("alibaba", {"enable_thinking": True, "thinking_budget": 9}, {"enable_thinking": False}),
        (
            "openrouter",
            {"reasoning": {"enabled": True, "effort": "low", "max_tokens": 9}},
            {"reasoning": {"enabled": False}},
        ),
        ("moonshot", {"reasoning_effort": "low"}, {"thinking": {"type": "disabled"}}),
        ("mistral", {"reasoning_effort": "low"}, {"reasoning_effort": "none"}),
    ],
)
async def test_a_request_for_thinking_uses_the_documented_vendors_own_field(
    name: str, on: dict[str, Any], off: dict[str, Any]
) -> None:
    settings = msgspec.structs.replace(DOCUMENTED[name], api_key_env="")
    usual = msgspec.json.decode((await call(settings, generate_for())).content)
    for thinking, wanted in ((Thinking(effort="low", budget_tokens=9), on), (Thinking(enabled=False), off)):
        decoded = msgspec.json.decode((await call(settings, generate_for(thinking=thinking))).content)
        assert {key: value for key, value in decoded.items() if key not in usual} == wanted


async def test_mistral_gets_no_field_that_it_refuses() -> None:
    settings = msgspec.structs.replace(DOCUMENTED["mistral"], api_key_env="")
    decoded = msgspec.json.decode((await call(settings, generate_for(max_tokens=7))).content)
    assert set(decoded) == {"model", "messages", "stream", "max_tokens"}


async def test_a_path_may_contain_the_apis_own_path_of_the_request() -> None:
    settings = ProviderSettings(
        api="openai-images", base_url="http://h", path="/deployments/{model}{path}", api_key_env=""
    )
    endpoint = Endpoint("dated", settings, {})
    image = ImagePart(source=Base64Source(media_type="image/png", data="AAAA"))
    paths: list[bytes] = []
    for more in ([], [image]):
        messages = [Message(role="user", content=[TextPart(text="A cat."), *more])]
        built = endpoint.build(Generate(provider="dated", model="{path}", messages=messages), [])
        paths.append(endpoint.request(built.call).url.raw_path)
    assert paths == [b"/deployments/%7Bpath%7D/images/generations", b"/deployments/%7Bpath%7D/images/edits"]


@pytest.mark.parametrize(
    ("stream", "path"), [(True, b"/model/m%3A0/invoke-with-response-stream"), (False, b"/model/m%3A0/invoke")]
)
async def test_a_whole_answer_may_have_a_path_of_its_own_and_a_body_further_fields_and_fewer(
    stream: bool, path: bytes
) -> None:
    settings = ProviderSettings(
        api="anthropic",
        base_url="http://h",
        path="/model/{model}/invoke-with-response-stream",
        path_whole="/model/{model}/invoke",
        body={"anthropic_version": "bedrock-2023-05-31", "max_tokens": 7},
        body_without=("model", "stream", "of_no_request"),
        api_key_env="",
    )
    endpoint = Endpoint("bedrock", settings, {})
    request = Generate(
        provider="bedrock", model="m:0", messages=[Message(role="user", content="Hi")], stream=stream, max_tokens=9
    )
    call = endpoint.build(request, []).call
    assert endpoint.request(call).url.raw_path == path
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    version = {"anthropic_version": "bedrock-2023-05-31", "max_tokens": 7}
    assert msgspec.json.decode(call.body) == {"messages": messages} | version


async def test_a_form_is_sent_as_it_is_whatever_fields_a_body_has() -> None:
    settings = ProviderSettings(api="openai-images", base_url="http://h", body_without=("prompt",), api_key_env="")
    image = ImagePart(source=Base64Source(media_type="image/png", data="AAAA"))
    messages = [Message(role="user", content=[TextPart(text="Blue."), image])]
    call = Endpoint("p", settings, {}).build(Generate(provider="p", model="m", messages=messages), []).call
    assert b'name="prompt"' in call.body


async def test_a_model_in_the_path_is_one_segment_and_cannot_change_the_path() -> None:
    settings = ProviderSettings(api="openai-chat", base_url="http://h/v1", path="/of/{model}/chat", api_key_env="")
    sent = await call(settings, generate_for("a/b c?d=é"))
    assert sent.url.raw_path == b"/v1/of/a%2Fb%20c%3Fd%3D%C3%A9/chat"
    for model in (".", "..", "a/../b", "a%2f..%2fb", "a\\b", "/a"):
        with pytest.raises(RequestInvalid) as error:
            await call(settings, generate_for(model))
        assert error.value.where == "model"


async def test_parameters_of_the_url_join_those_of_the_api() -> None:
    settings = ProviderSettings(api="openai-chat", base_url="http://h", query={"a": "1 2", "b": ""}, api_key_env="")
    assert (await call(settings, generate_for())).url == httpx.URL("http://h/chat/completions?a=1+2&b=")


@pytest.mark.parametrize(
    ("header", "form", "sent"),
    [
        (None, None, ("x-api-key", "secret")),
        ("api-key", None, ("api-key", "secret")),
        ("authorization", "Bearer {}", ("authorization", "Bearer secret")),
        (None, "key={}", ("x-api-key", "key=secret")),
    ],
)
async def test_the_key_is_where_and_as_the_settings_say(
    header: str | None, form: str | None, sent: tuple[str, str]
) -> None:
    settings = ProviderSettings(api="anthropic", base_url="http://h", key_header=header, key_format=form)
    headers = (await call(settings, generate_for(), ANTHROPIC_API_KEY="secret")).headers
    assert {key: headers[key] for key in KEY_HEADERS if key in headers} == {sent[0]: sent[1]}


@pytest.mark.parametrize(
    ("toml", "where"),
    [
        ('api = "openai-chat"\nbase_url = "api.example.org/v1"', "base_url"),
        ('api = "openai-chat"\nbase_url = "https://h/v1?key=1"', "base_url"),
        ('api = "openai-chat"\nkey_header = "api key"', "key_header"),
        ('api = "openai-chat"\nkey_header = "api-key\\n"', "key_header"),
        ('api = "openai-chat"\nkey_format = "Bearer"', "key_format"),
        ('api = "openai-chat"\nkey_format = "{}{}"', "key_format"),
        ('api = "openai-chat"\nheaders = { "a b" = "c" }', "headers"),
        ('api = "openai-chat"\nquirks = { max_token_field = "max_tokens" }', "quirks"),
        ('api = "openai-chat"\nquirks = { inline_thinking = ["<think>"] }', "inline_thinking"),
        ('api = "gemini"\npath = "/x"', "gemini supports no custom path"),
    ],
)
def test_a_provider_that_cannot_be_is_refused_with_its_place(toml: str, where: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=where):
        msgspec.toml.decode(f"[providers.p]\n{toml}", type=Settings)


def test_an_address_that_is_none_is_an_error_of_the_settings() -> None:
    with pytest.raises(SettingsError, match=r"p\.base_url"):
        Endpoint("p", ProviderSettings(api="openai-chat", base_url="http://h:none/v1"), {})


@pytest.mark.parametrize(("auth", "problem"), [("nowhere_at_all:made", "No module"), ("os:getcwd", "without")])
def test_an_auth_that_cannot_be_made_is_an_error_at_the_start(auth: str, problem: str) -> None:
    settings = Settings(providers={"acme": ProviderSettings(api="openai-chat", auth=auth)})
    with pytest.raises(SettingsError, match=problem) as caught:
        Providers(settings, {})
    assert caught.value.where == "acme.auth"


def test_a_key_that_was_replaced_is_taken_out_of_answers_and_logs_like_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "key"
    first, second = f"key-{uuid4().hex}", f"key-{uuid4().hex}-and-more"
    path.write_text(first)
    endpoint = Endpoint("p", ProviderSettings(api="openai-chat", base_url="http://h/v1", api_key_file=str(path)), {})
    call = endpoint.build(Generate(provider="p", model="m", messages=[Message(role="user", content="Hi")]), []).call
    endpoint.request(call)
    answer = RedactedEvents(endpoint.redact)  # of a call that still runs when the key is replaced
    path.write_text(second)
    endpoint.request(call)
    for key in (first, second):
        assert endpoint.redact(f"wrong key: {key}") == "wrong key: [redacted]"
        assert LEARNED(f"wrong key: {key}") == "wrong key: [redacted]"
        line = f'data: {{"a":"{key}"}}\n\n'.encode()
        assert answer.feed(line) == line.replace(key.encode(), b"[redacted]")


async def test_a_token_is_taken_out_even_after_it_was_refused_and_of_what_its_source_says() -> None:
    tokens = iter([Token(f"tok-{uuid4().hex}", 60.0), Token(f"tok-{uuid4().hex}", 60.0)])
    used: list[str] = []

    async def fetch() -> Token:
        used.append((token := next(tokens)).value)
        return token

    auth = TokenAuth(fetch, clock=lambda: 0.0, lock=asyncio.Lock())
    module = types.ModuleType("made_here")
    module.made = lambda: auth  # pyright: ignore[reportAttributeAccessIssue]
    sys.modules["made_here"] = module
    try:
        settings = ProviderSettings(api="openai-chat", base_url="http://127.0.0.1:1/v1", auth="made_here:made")
        endpoint = Endpoint("p", settings, {"MY_SECRET": "what-it-was-given"})
    finally:
        del sys.modules["made_here"]
    call = endpoint.build(Generate(provider="p", model="m", messages=[Message(role="user", content="Hi")]), []).call
    for _ in range(2):
        with pytest.raises(httpx.ConnectError):
            await endpoint.send(endpoint.request(call))
        assert endpoint.rejected()
    assert endpoint.redact(" ".join(used)) == LEARNED(" ".join(used)) == "[redacted] [redacted]"
    await endpoint.close()


@pytest.mark.parametrize("url", ["https://xn--a/x", "https://xn--/x", "https://[::1/x", "https://a\x00b/x"])
async def test_an_upload_address_of_a_provider_that_is_none_is_refused_by_name(url: str) -> None:
    endpoint = Endpoint("p", ProviderSettings(api="gemini", api_key_env=""), {})
    with pytest.raises(RequestInvalid, match="no address"):
        endpoint.file_request(FileCall(path=url), MediaBody([b"content"]))
    await endpoint.close()
