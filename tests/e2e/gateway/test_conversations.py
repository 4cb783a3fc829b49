"""OpenAI's conversations, with its own Python client at its defaults and its answers strictly validated."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import openai
import pytest
import redis

from tests.waiting import eventually_sync
from tokenbus.bus.keys import Keys
from tokenbus.testing import LocalBus
from tokenbus_services.gateway.keys.key import new_key
from tokenbus_services.mock_provider import Reply, Stall, ToolCall, Turn

ADA, EVE, MAL = new_key(), new_key(), new_key()
SETTINGS = "[gateway]\n" + "".join(
    f'[gateway.keys.{name}]\nsha256 = "{key.sha256}"\n' for name, key in (("ada", ADA), ("eve", EVE), ("mal", MAL))
)
SETTINGS += "[limits]\nsession_share = 0.01\n"
MAXMEMORY = 1600 * 2**20
TOOL: Any = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}
MODEL = "anthropic/text"


@pytest.fixture(scope="module")
def bus() -> Generator[LocalBus]:
    with LocalBus(SETTINGS) as running:
        with redis.Redis.from_url(running.url) as server:
            server.config_set("maxmemory", MAXMEMORY)
        running.model_says("text", Reply(thinking="let me see", text="one"), "two", "three")
        running.model_says("slow", Turn(says=Reply(text="one two three"), fault=Stall(after_text="two")))
        call = ToolCall(name="weather", arguments={"city": "Rome"})
        running.model_says("calls", Reply(text="I look.", tool_calls=(call,)), "Sunny.")
        yield running


@pytest.fixture(scope="module")
def client(bus: LocalBus) -> Generator[openai.OpenAI]:
    with openai.OpenAI(api_key=ADA.text, base_url=f"{bus.gateway}/v1", _strict_response_validation=True) as made:
        yield made


def sent(bus: LocalBus) -> list[tuple[str, str]]:
    """The conversation in the newest request to the provider."""
    found: list[tuple[str, str]] = []
    for message in bus.requests[-1]["messages"]:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        found += [(message["role"], part.get("text", part["type"])) for part in parts if part["type"] != "thinking"]
    return found


@pytest.mark.parametrize("model", [MODEL, "openai-responses/text"])
def test_each_response_continues_the_conversation_and_adds_to_it(
    bus: LocalBus, client: openai.OpenAI, model: str
) -> None:
    begun = client.conversations.create(
        items=[{"type": "message", "role": "user", "content": "I am Ada."}], metadata={"room": "7"}
    )
    assert begun.id.startswith("conv_")
    first = client.responses.create(model=model, input="Hello!", conversation=begun.id)
    assert first.conversation is not None
    assert first.conversation.id == begun.id
    with client.responses.create(model=model, input="And?", conversation={"id": begun.id}, stream=True) as stream:
        ended = [event for event in stream if event.type == "response.completed"]
    assert ended[0].response.conversation == first.conversation
    listed = list(client.conversations.items.list(begun.id, order="asc"))
    roles = [item.role for item in listed if item.type == "message"]
    assert roles == ["user", "user", "assistant", "user", "assistant"]
    assert [item.id for item in listed if item.id in {out.id for out in first.output}] == [o.id for o in first.output]
    third = client.responses.create(model=model, input="Last?", conversation=begun.id)
    assert third.output_text == "three"
    if model == MODEL:
        assert sent(bus) == [
            *(("user", "I am Ada."), ("user", "Hello!"), ("assistant", "one")),
            *(("user", "And?"), ("assistant", "two"), ("user", "Last?")),
        ]


def test_items_are_added_read_referred_to_and_removed(bus: LocalBus, client: openai.OpenAI) -> None:
    begun = client.conversations.create()
    added = client.conversations.items.create(
        begun.id,
        items=[
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": f"fact {n}"}]}
            for n in range(3)
        ],
    )
    names: list[str] = [str(item.id) for item in added.data]
    assert len(set(names)) == 3
    newest = client.conversations.items.list(begun.id, limit=2)
    assert [item.id for item in newest.data] == [names[2], names[1]]
    assert newest.has_more
    assert [item.id for item in client.conversations.items.list(begun.id, limit=1)] == names[::-1]
    one = client.conversations.items.retrieve(names[1], conversation_id=begun.id)
    assert one == added.data[1]
    client.conversations.items.delete(names[1], conversation_id=begun.id)
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.retrieve(names[1], conversation_id=begun.id)
    # As the AI SDK does: what the conversation has is there once, what another response has is put in its place.
    other = client.responses.create(model=MODEL, input="Elsewhere.")
    reference: list[Any] = [{"type": "item_reference", "id": names[0]}, {"id": other.output[-1].id}]
    said: Any = {"type": "message", "role": "user", "content": "Go on."}
    client.responses.create(model=MODEL, input=[*reference, said], conversation=begun.id)
    assert sent(bus) == [("user", "fact 0"), ("user", "fact 2"), ("assistant", "one"), ("user", "Go on.")]
    changed = client.conversations.update(begun.id, metadata={"room": "8"})
    assert client.conversations.retrieve(begun.id) == changed
    assert changed.metadata == {"room": "8"}
    assert client.conversations.delete(begun.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(begun.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model=MODEL, input="x", conversation=begun.id)


def test_the_result_of_a_tool_continues_a_conversation(bus: LocalBus, client: openai.OpenAI) -> None:
    begun = client.conversations.create()
    first = client.responses.create(model="anthropic/calls", input="Sun?", tools=[TOOL], conversation=begun.id)
    call = first.output[-1]
    assert call.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second = client.responses.create(model="anthropic/calls", input=[result], tools=[TOOL], conversation=begun.id)
    assert second.output_text == "Sunny."
    kinds = [item.type for item in client.conversations.items.list(begun.id, order="asc")]
    assert kinds == ["message", "message", "function_call", "function_call_output", "message"]


def test_a_conversation_is_held_by_one_response_at_a_time_and_what_was_cancelled_adds_nothing(
    bus: LocalBus, client: openai.OpenAI
) -> None:
    begun = client.conversations.create()
    slow = client.responses.create(model="anthropic/slow", input="Hello!", conversation=begun.id, background=True)
    with pytest.raises(openai.ConflictError) as refused:  # after the client's own retries
        client.responses.create(model=MODEL, input="Me too.", conversation=begun.id)
    assert refused.value.code == "conversation_locked"
    client.with_options(max_retries=0).post(f"/responses/{slow.id}/cancel", cast_to=object)
    assert list(client.conversations.items.list(begun.id)) == []
    client.responses.create(model=MODEL, input="Hello!", conversation=begun.id)
    assert len(list(client.conversations.items.list(begun.id))) >= 2


def test_what_a_response_said_is_added_though_nobody_asks_for_the_conversation(
    bus: LocalBus, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = client.conversations.create()
    monkeypatch.setattr("tokenbus_services.gateway.conversation_store.LOOK_S", 0.1)
    client.responses.create(model=MODEL, input="Hello!", conversation=begun.id)
    held = f"{Keys().prefix}:{{gateway}}:conversation:open"
    with redis.Redis.from_url(bus.url) as direct:
        eventually_sync(lambda: direct.zcard(held) == 0, timeout=60)


def test_a_conversation_is_of_its_tenant_and_what_is_wrong_is_refused(bus: LocalBus, client: openai.OpenAI) -> None:
    begun = client.conversations.create()
    with openai.OpenAI(api_key=EVE.text, base_url=f"{bus.gateway}/v1") as eve:
        for ask in (
            lambda: eve.conversations.retrieve(begun.id),
            lambda: eve.conversations.delete(begun.id),
            lambda: eve.conversations.items.list(begun.id),
            lambda: eve.responses.create(model=MODEL, input="x", conversation=begun.id),
        ):
            with pytest.raises(openai.NotFoundError):
                ask()
    wrong: list[dict[str, Any]] = [
        {"conversation": begun.id, "previous_response_id": "resp_x"},
        {"conversation": 7},
        {"conversation": begun.id, "input": 7},
        {"conversation": begun.id, "input": ["x"]},
        {"conversation": begun.id, "input": [{"type": "item_reference", "id": "msg_x_0"}]},
    ]
    for fields in wrong:
        with pytest.raises(openai.BadRequestError):
            client.responses.create(**{"model": MODEL, "input": "x", **fields})
    for items in ([{"type": "nothing"}], 21 * [{"type": "message", "role": "user", "content": "x"}], ["x"]):
        with pytest.raises(openai.BadRequestError):
            client.conversations.create(items=items)  # pyright: ignore[reportArgumentType]
    with pytest.raises(openai.BadRequestError):
        client.conversations.create(metadata={"x": "y" * 513})


def test_one_tenant_does_not_fill_the_server_with_conversations(bus: LocalBus, client: openai.OpenAI) -> None:
    large: Any = [{"type": "message", "role": "user", "content": "x" * 3_900_000}]
    with openai.OpenAI(api_key=MAL.text, base_url=f"{bus.gateway}/v1") as mal:
        begun = [mal.conversations.create(items=large) for _ in range(4)]
        for more in (mal.conversations.create, lambda items: mal.conversations.items.create(begun[0].id, items=items)):
            with pytest.raises(openai.BadRequestError, match=r"session_share.*there is room again in \d+ s"):
                more(items=large)
        for each in begun:
            mal.conversations.delete(each.id)
    assert client.conversations.create(items=large).id
