"""The AsyncAPI page of each service that writes or reads topics."""

from __future__ import annotations

import json

import httpx
import jsonschema_rs

from tokenbus_services.fetcher.app import create as fetcher
from tokenbus_services.parser.app import create
from tokenbus_services.settings import Settings


async def test_the_parsers_page_shows_the_events_of_its_topics() -> None:
    app = create(Settings(redis_url="redis://:a-password@127.0.0.1:1"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://parser") as http:
        page = await http.get("/asyncapi")
    assert page.status_code == 200
    for word in ("visible", "block_complete", "tool_call_part", "incomplete"):
        assert word in page.text
    assert "a-password" not in page.text


async def test_a_schema_refers_to_nothing_outside_itself() -> None:
    app = create(Settings(redis_url="redis://127.0.0.1:1"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://parser") as http:
        document = (await http.get("/asyncapi.json")).json()
    messages = document["components"]["messages"]
    for topic in ("visible", "chunks", "blocks", "runs"):
        name = messages[f"{topic}:Message"]["payload"]["$ref"].rpartition("/")[2]
        schema = json.dumps(document["components"]["schemas"][name])
        assert "$ref" not in schema
        assert '"seq"' in schema


async def test_the_fetchers_page_shows_what_a_request_is() -> None:
    app = fetcher(Settings(redis_url="redis://127.0.0.1:1"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://fetcher") as http:
        document = (await http.get("/asyncapi.json")).json()
    message = document["components"]["messages"]["intake:SubscribeMessage"]["payload"]["$ref"].rpartition("/")[2]
    payload = jsonschema_rs.validator_for(document["components"]["schemas"][message])
    messages = [{"role": "user", "content": "Hi"}]
    assert payload.is_valid({"type": "generate", "provider": "p", "model": "m", "messages": messages})
    assert payload.is_valid({"type": "cancel", "run": "umbrella"})
    assert not payload.is_valid({"type": "generate", "provider": "p", "model": "m", "messages": []})
