"""Unmodified agent libraries for OpenAI's protocols: each reads a text, runs a tool, and gets an error after a cut."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest

pytest.importorskip("langchain_openai", reason="langchain-openai is not installed: make test-clients")

import openai
from agents import Agent as OpenAIAgent
from agents import OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic_ai import Agent
from pydantic_ai.exceptions import ModelAPIError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.models.openai import OpenAIResponsesModel as PydanticResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.more_clients.conftest import TEXT

set_tracing_disabled(True)
SO = "So: rain in Bonn"


@pytest.fixture
async def client(base: str) -> AsyncGenerator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=base, api_key="any", max_retries=0) as made:
        yield made


# --- LangChain ------------------------------------------------------------------------------------------------------


def langchain(base: str, model: str, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(model=f"anthropic/{model}", base_url=base, api_key="any", max_retries=0, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("responses", [False, True])
def test_langchain_reads_an_answer_whole_and_streamed(base: str, responses: bool) -> None:
    model = langchain(base, "text", use_responses_api=responses)
    assert model.invoke("Hello.").text == TEXT
    assert "".join(chunk.text for chunk in model.stream("Hello.")) == TEXT


def test_langchain_is_asked_for_a_tool(base: str) -> None:
    @tool
    def get_weather(city: str) -> str:
        """The weather."""
        return f"rain in {city}"

    (call,) = langchain(base, "calls").bind_tools([get_weather]).invoke("Rain?").tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Bonn"})


def test_langchain_gets_an_error_for_a_cut_and_for_a_failure(base: str) -> None:
    with pytest.raises(openai.APIError):
        list(langchain(base, "cut").stream("Hello."))
    with pytest.raises(openai.BadRequestError):
        langchain(base, "failing").invoke("Hello.")


def test_langchains_error_names_the_refused_parameter(base: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        langchain(base, "text", n=2).invoke("Hello.")
    assert caught.value.param == "n"


# --- pydantic-ai ----------------------------------------------------------------------------------------------------


def pydantic_agent(client: openai.AsyncOpenAI, kind: Any, model: str) -> Agent:
    return Agent(kind(f"anthropic/{model}", provider=OpenAIProvider(openai_client=client)), retries=0)


PYDANTIC = pytest.mark.parametrize("kind", [OpenAIChatModel, PydanticResponsesModel])


@PYDANTIC
async def test_pydantic_ai_reads_an_answer_whole_and_streamed(client: openai.AsyncOpenAI, kind: Any) -> None:
    agent = pydantic_agent(client, kind, "text")
    assert (await agent.run("Hello.")).output == TEXT
    async with agent.run_stream("Hello.") as stream:
        assert "".join([text async for text in stream.stream_text(delta=True)]) == TEXT


@PYDANTIC
async def test_pydantic_ai_runs_a_tool_and_sends_the_result_back(client: openai.AsyncOpenAI, kind: Any) -> None:
    agent = pydantic_agent(client, kind, "calls")

    @agent.tool_plain
    def get_weather(city: str) -> str:
        return f"rain in {city}"

    assert (await agent.run("Rain?")).output == SO


@PYDANTIC
async def test_pydantic_ai_gets_an_error_for_a_cut_and_for_a_failure(client: openai.AsyncOpenAI, kind: Any) -> None:
    with pytest.raises(ModelAPIError):
        async with pydantic_agent(client, kind, "cut").run_stream("Hello.") as stream:
            assert [text async for text in stream.stream_text()]
    with pytest.raises(ModelAPIError):
        await pydantic_agent(client, kind, "failing").run("Hello.")


# --- openai-agents --------------------------------------------------------------------------------------------------


def openai_agent(client: openai.AsyncOpenAI, kind: Any, model: str, *tools: Any) -> OpenAIAgent[Any]:
    return OpenAIAgent(name="Ann", model=kind(f"anthropic/{model}", client), tools=list(tools))


AGENTS = pytest.mark.parametrize("kind", [OpenAIChatCompletionsModel, OpenAIResponsesModel])


@AGENTS
async def test_openai_agents_reads_an_answer_whole_and_streamed(client: openai.AsyncOpenAI, kind: Any) -> None:
    agent = openai_agent(client, kind, "text")
    assert (await Runner.run(agent, "Hello.")).final_output == TEXT
    streamed = Runner.run_streamed(agent, "Hello.")
    assert [event async for event in streamed.stream_events()]
    assert streamed.final_output == TEXT


@AGENTS
async def test_openai_agents_runs_a_tool_and_sends_the_result_back(client: openai.AsyncOpenAI, kind: Any) -> None:
    @function_tool
    def get_weather(city: str) -> str:
        return f"rain in {city}"

    assert (await Runner.run(openai_agent(client, kind, "calls", get_weather), "Rain?")).final_output == SO


@AGENTS
async def test_openai_agents_gets_an_error_for_a_cut_and_for_a_failure(client: openai.AsyncOpenAI, kind: Any) -> None:
    streamed = Runner.run_streamed(openai_agent(client, kind, "cut"), "Hello.")
    with pytest.raises(Exception, match=r"network|failed"):
        async for _ in streamed.stream_events():
            pass
    with pytest.raises(openai.BadRequestError):
        await Runner.run(openai_agent(client, kind, "failing"), "Hello.")
