"""What is no run is forwarded: real clients at their defaults, under the keys, limits and budgets of the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

import anthropic
import httpx
import msgspec
import openai
import pytest
from google import genai
from google.genai import types

from tests.e2e.gateway.served import auth
from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.server.server import Server
from tokenbus.testing import LocalBus
from tokenbus_services.gateway.budgets.spend import ClientSpend, read_spend
from tokenbus_services.gateway.keys.key import NewKey, new_key
from tokenbus_services.mock_provider import CutOff, Delivery, Fixed, Reply, Stall, Status, Turn, Wire

Json = dict[str, Any]
NAMES = ("any", "narrow", "runs_only", "poor", "cut", "left", "single")
KEYS: dict[str, NewKey] = {name: new_key() for name in NAMES}
RULES = {
    "narrow": 'models = ["openai-chat/small"]',
    "runs_only": 'surfaces = ["openai_chat"]',
    "poor": "max_budget = 0.001",
    "cut": "max_budget = 1",
    "left": "max_budget = 1",
    "single": "max_parallel_requests = 1",
}
SETTINGS = """
[gateway]
forward = ["embeddings", "moderations", "token_counts", "compact"]
[gateway.aliases]
vectors = ["anthropic/none", "openai-chat/small"]
default = ["openai-chat/small"]
[gateway.prices."openai-chat/"]
input = 100
output = 1000
max_output = 10
[providers.nothing-there]
api = "anthropic"
base_url = "http://127.0.0.1:1"
api_key_env = ""
connect_timeout_s = 5
""" + "".join(f'[gateway.keys.{name}]\nsha256 = "{key.sha256}"\n{RULES.get(name, "")}\n' for name, key in KEYS.items())


@pytest.fixture(scope="module")
def bus() -> Generator[LocalBus]:
    with LocalBus(SETTINGS) as running:
        for name in ("small", "other", "text"):
            running.model_says(name, Reply(text="one two three"))
        yield running


@pytest.fixture
def http(bus: LocalBus) -> Generator[httpx.Client]:
    with httpx.Client(base_url=bus.gateway, timeout=60, headers=auth(KEYS["any"])) as client:
        yield client


def openai_client(bus: LocalBus, key: str = "any") -> openai.OpenAI:
    return openai.OpenAI(api_key=KEYS[key].text, base_url=f"{bus.gateway}/v1", max_retries=0)


def anthropic_client(bus: LocalBus) -> anthropic.Anthropic:
    return anthropic.Anthropic(api_key=KEYS["any"].text, base_url=f"{bus.gateway}/anthropic", max_retries=0)


def google_client(bus: LocalBus) -> genai.Client:
    return genai.Client(api_key=KEYS["any"].text, http_options=types.HttpOptions(base_url=f"{bus.gateway}/gemini"))


def received(bus: LocalBus) -> tuple[str, Json, dict[str, str]]:
    """Path, body and headers of the provider's last request."""
    request = bus.exchanges[-1].http_request
    return request.path, msgspec.json.decode(request.body), dict(request.headers)


def embed(http: httpx.Client, model: str = "openai-chat/small", key: str = "any", **more: Any) -> httpx.Response:
    return http.post("/v1/embeddings", json={"model": model, "input": "a b c", **more}, headers=auth(KEYS[key]))


async def spend_of(bus: LocalBus, key: str) -> ClientSpend:
    async with Server(bus.url) as server:
        [spend] = await read_spend(server, Keys(), [key])
        return spend


async def spent(bus: LocalBus, key: str, runs: int) -> ClientSpend:
    """What a key has spent once so many requests are counted; nothing is reserved then."""

    async def counted() -> ClientSpend | None:
        spend = await spend_of(bus, key)
        return spend if spend.total.runs == runs and spend.reserved == 0 else None

    spend = await eventually(counted)
    assert spend
    return spend


# --- real clients -----------------------------------------------------------------------------------------------


def test_openais_client_gets_embeddings_and_the_provider_gets_what_it_sent(bus: LocalBus) -> None:
    with openai_client(bus) as client:
        answer = client.embeddings.create(model="openai-chat/small", input=["a b", "c"], dimensions=4, user="u")
    assert [len(each.embedding) for each in answer.data] == [4, 4]
    assert answer.usage.total_tokens == 3
    path, body, headers = received(bus)
    assert path == "/v1/embeddings"
    sent = {"input": ["a b", "c"], "model": "small", "dimensions": 4, "user": "u", "encoding_format": "base64"}
    assert body == sent
    assert KEYS["any"].text not in str(headers)
    assert not [name for name in headers if name.startswith(("x-stainless", "x-tokenbus", "openai-org"))]


def test_openais_client_moderates_without_a_model(bus: LocalBus) -> None:
    with openai_client(bus) as client:
        assert client.moderations.create(input="harm").results[0].flagged
    assert received(bus)[:2] == ("/v1/moderations", {"input": "harm"})


def test_openais_client_compacts_and_counts(bus: LocalBus) -> None:
    with openai_client(bus) as client:
        assert client.responses.compact(model="openai-responses/text", input="a b c").usage.input_tokens == 3
        counted = client.responses.input_tokens.count(model="openai-responses/text", input="a b c d")
    assert counted.input_tokens == 4
    assert received(bus)[0] == "/v1/responses/input_tokens"


def test_anthropics_client_counts_at_a_provider_of_its_api(bus: LocalBus) -> None:
    with anthropic_client(bus) as client:
        answer = client.messages.with_raw_response.count_tokens(
            model="anthropic/text", messages=[{"role": "user", "content": "a b c"}]
        )
    assert answer.parse().input_tokens == 4  # the words of the message, its role among them
    assert "x-tokenbus-estimated" not in answer.headers
    path, body, headers = received(bus)
    assert (path, body["model"]) == ("/v1/messages/count_tokens", "text")
    assert "anthropic-version" in headers


def test_googles_client_embeds_and_counts(bus: LocalBus) -> None:
    with google_client(bus) as client:
        answer = client.models.embed_content(model="gemini/text", contents=["a", "b"])
        assert answer.embeddings
        assert [len(each.values or []) for each in answer.embeddings] == [4, 4]
        assert received(bus)[0] == "/v1beta/models/text:batchEmbedContents"
        assert client.models.count_tokens(model="gemini/text", contents="a b").total_tokens
        assert received(bus)[0] == "/v1beta/models/text:countTokens"


def test_an_alias_takes_its_first_provider_that_has_the_path(bus: LocalBus, http: httpx.Client) -> None:
    assert embed(http, "vectors").status_code == 200
    assert received(bus)[1]["model"] == "small"


# --- estimates ---------------------------------------------------------------------------------------------------


def test_each_clients_count_is_estimated_where_the_provider_has_none_and_says_so(bus: LocalBus) -> None:
    before = len(bus.exchanges)
    text = "word " * 400
    with anthropic_client(bus) as client:
        of_messages = client.messages.with_raw_response.count_tokens(
            model="openai-chat/small", system="Be kind.", messages=[{"role": "user", "content": text}]
        )
    with openai_client(bus) as client:
        of_responses = client.responses.input_tokens.with_raw_response.count(model="anthropic/text", input=text)
    with google_client(bus) as client:
        of_gemini = client.models.count_tokens(model="anthropic/text", contents=text)
    counts = [of_messages.parse().input_tokens, of_responses.parse().input_tokens, of_gemini.total_tokens or 0]
    assert all(400 <= count <= 600 for count in counts)
    google: Any = of_gemini.sdk_http_response
    headers = [of_messages.headers, of_responses.headers, google.headers]
    assert [each["x-tokenbus-estimated"] for each in headers] == ["input_tokens"] * 3
    assert msgspec.json.decode(of_messages.text())["estimated"] is True
    assert len(bus.exchanges) == before


def test_a_provider_without_the_path_is_estimated_for(bus: LocalBus, http: httpx.Client) -> None:
    bus.model_says("uncounted", Turn(says=Reply(), fault=Status(status=404)))
    body = {"model": "anthropic/uncounted", "messages": [{"role": "user", "content": "x"}]}
    answer = http.post("/anthropic/v1/messages/count_tokens", json=body)
    assert answer.status_code == 200
    assert answer.headers["x-tokenbus-estimated"] == "input_tokens"


# --- rights, limits, budgets ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "model", "status", "code"),
    [
        ("narrow", "openai-chat/small", 200, ""),
        ("narrow", "openai-chat/other", 403, "model_not_allowed"),
        ("runs_only", "openai-chat/small", 403, "forward_not_allowed"),
        ("any", "anthropic/text", 400, "unsupported_provider"),
        ("any", "nobody/text", 404, "model_not_found"),
        ("poor", "openai-responses/text", 403, "model_not_priced"),
    ],
)
def test_a_key_forwards_what_its_rules_allow(http: httpx.Client, key: str, model: str, status: int, code: str) -> None:
    answer = embed(http, model, key)
    assert answer.status_code == status
    assert answer.json().get("error", {"code": ""})["code"] == code


async def test_tokens_are_counted_at_their_price_and_a_spent_budget_forwards_nothing(
    bus: LocalBus, http: httpx.Client
) -> None:
    before = len(bus.exchanges)
    for n in (1, 2):
        assert embed(http, key="poor", input="w " * 5).status_code == 200
        spend = await spent(bus, "poor", n)
    assert (spend.total.input, spend.total.output) == (10, 0)
    assert spend.total.cost == pytest.approx(10 * 100 / 1e6)
    assert embed(http, key="poor").json()["error"]["code"] == "budget_exceeded"
    assert len(bus.exchanges) == before + 2


async def test_an_answer_that_is_cut_costs_what_was_estimated(bus: LocalBus, http: httpx.Client) -> None:
    bus.model_says("cut", Turn(says=Reply(), fault=CutOff(after_bytes=20)))
    with pytest.raises(httpx.RemoteProtocolError):
        embed(http, "openai-chat/cut", key="cut", input="w" * 400)
    spend = await spent(bus, "cut", 1)
    assert 100 <= spend.total.input <= 120


async def test_a_client_that_leaves_ends_the_call_and_pays_for_it(bus: LocalBus) -> None:
    bus.model_says("stalled", Turn(says=Reply(), fault=Stall(after_bytes=20)))
    async with httpx.AsyncClient(base_url=bus.gateway, timeout=60, headers=auth(KEYS["left"])) as client:
        before = await spend_of(bus, "left")
        body = {"model": "openai-chat/stalled", "input": "w"}
        async with client.stream("POST", "/v1/embeddings", json=body) as answer:
            assert answer.status_code == 200
            await anext(answer.aiter_raw())
    await eventually(lambda: bus.exchanges[-1].state == "disconnected")
    await spent(bus, "left", before.total.runs + 1)


async def test_a_client_that_leaves_before_the_head_ends_the_call(bus: LocalBus) -> None:
    bus.model_says("silent", Turn(says=Reply(), delivery=Delivery(delay_s=600)))
    async with httpx.AsyncClient(base_url=bus.gateway, timeout=60, headers=auth(KEYS["left"])) as client:
        before = len(bus.exchanges)
        body = {"model": "openai-chat/silent", "input": "w"}
        asking = asyncio.create_task(client.post("/v1/embeddings", json=body))
        await eventually(lambda: len(bus.exchanges) > before)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await eventually(lambda: bus.exchanges[-1].state == "disconnected")


async def test_a_forwarded_answer_takes_a_place_of_the_key_until_it_has_ended(bus: LocalBus) -> None:
    bus.model_says("held", Turn(says=Reply(), fault=Stall(after_bytes=20)))
    async with httpx.AsyncClient(base_url=bus.gateway, timeout=60, headers=auth(KEYS["single"])) as client:
        held, free = ({"model": f"openai-chat/{name}", "input": "w"} for name in ("held", "small"))
        async with client.stream("POST", "/v1/embeddings", json=held) as answer:
            assert answer.status_code == 200
            refused = await client.post("/v1/embeddings", json=free)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_runs")

        async def ends() -> bool:
            return (await client.post("/v1/embeddings", json=free)).status_code == 200

        await eventually(ends)


# --- errors and bounds ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [
        (Status(status=400), 400, "invalid_request_error"),
        (Status(status=401, body=b'{"error": {"message": "the key KEY is wrong"}}'), 502, "upstream_auth"),
        (Status(status=429, headers={"retry-after": "3"}), 429, "rate_limit_exceeded"),
        (Status(status=500), 502, "server_error"),
    ],
)
def test_a_providers_error_has_the_form_of_the_surface(
    bus: LocalBus, http: httpx.Client, fault: Status, status: int, code: str
) -> None:
    bus.model_says("fails", Turn(says=Reply(), fault=fault))
    before = len(bus.exchanges)
    answer = embed(http, "openai-chat/fails")
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert "KEY" not in answer.text
    assert len(bus.exchanges) == before + 1  # nothing is repeated


def test_a_provider_that_cannot_be_reached_is_an_error_of_the_gateway(http: httpx.Client) -> None:
    body = {"model": "nothing-there/x", "messages": [{"role": "user", "content": "x"}]}
    answer = http.post("/anthropic/v1/messages/count_tokens", json=body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (502, "api_error")
    assert "127.0.0.1" not in answer.text


def test_an_answer_larger_than_any_buffer_passes_whole(bus: LocalBus, http: httpx.Client) -> None:
    usage = b'{"usage": {"prompt_tokens": 3, "total_tokens": 3}, "data": "'
    body = usage + b"x" * (40 * 2**20) + b'"}'
    bus.model_says("large", Turn(says=Wire(stream=b"", body=body), delivery=Delivery(cuts=Fixed(size=2**18))))
    assert embed(http, "openai-chat/large").content == body


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("POST", "/v1/audio/speech", 404, 'gateway.forward has "audio"'),
        ("POST", "/v1/responses/odd", 404, "is not served by this gateway"),
        ("GET", "/gemini/v1beta/tunedModels", 404, "is not served by this gateway"),
        ("POST", "/v1beta/models/../../secret:embedContent", 404, ""),
        ("POST", "/v1beta/models/gemini%2F..%2f..:embedContent", 400, "part of a path"),
        ("POST", "/v1beta/models/gemini%2Fa%252fb:embedContent", 400, "part of a path"),
        ("POST", "/v1beta/models/gemini%2Ftext:embedContent?key=x", 400, "a key in the URL"),
    ],
)
def test_what_is_not_forwarded_says_what_it_is_and_what_to_do(
    bus: LocalBus, http: httpx.Client, method: str, path: str, status: int, words: str
) -> None:
    before = len(bus.exchanges)
    answer = http.request(method, path, content=b"{}")
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]
    assert len(bus.exchanges) == before


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"no json", "invalid_json"),
        (b"[]", "invalid_value"),
        (b"{}", "invalid_value"),
        (b'{"model": 1}', "invalid_value"),
        (b'{"model": ' + b"[" * 50_000, "invalid_json"),
        (b'{"model": "\xff"}', "invalid_json"),
        (b'{"model": "openai-chat/other", "model": "openai-chat/small", "input": "x"}', None),
    ],
)
def test_a_hostile_body_is_refused_by_its_name(
    bus: LocalBus, http: httpx.Client, body: bytes, code: str | None
) -> None:
    answer = http.post("/v1/embeddings", content=body, headers=auth(KEYS["narrow"]))
    assert answer.json().get("error", {}).get("code") == code
    assert code or received(bus)[1] == {"model": "small", "input": "x"}


@pytest.mark.parametrize(
    ("name", "value"), [("previous_response_id", "resp_1"), ("conversation", "conv_1"), ("prompt", {"id": "pmpt_1"})]
)
@pytest.mark.parametrize("path", ["/v1/responses/compact", "/v1/responses/input_tokens"])
def test_a_stored_conversation_of_the_gateway_or_the_account_is_no_input_of_the_provider(
    http: httpx.Client, bus: LocalBus, path: str, name: str, value: object
) -> None:
    before = len(bus.exchanges)
    answer = http.post(path, json={"model": "openai-responses/text", name: value, "input": "x"})
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == name
    assert len(bus.exchanges) == before


@pytest.mark.parametrize("name", ["anthropic-beta", "openai-beta", "accept", "anthropic-version"])
def test_a_header_of_odd_bytes_is_sent_or_refused_and_is_no_defect(http: httpx.Client, name: str) -> None:
    content = msgspec.json.encode({"model": "openai-chat/small", "input": "x"})
    headers = [(b"content-type", b"application/json"), (name.encode(), b"a\xff\xe4")]
    assert http.post("/v1/embeddings", content=content, headers=headers).status_code < 500
