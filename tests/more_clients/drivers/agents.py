"""Libraries for agents that have a model class for each provider's API."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from typing import Any, ClassVar

from tests.more_clients.features import AND_NOW, APIS, HELLO, MODELS, PDF, PNG, Client, Weather, coded, get_weather

# --- LangChain --------------------------------------------------------------------------------------------------------


class LangChain(Client):
    model: Any

    def ask(self, model: str, said: Any) -> Any:
        parts = {
            PNG: {"type": "image", "base64": coded(PNG), "mime_type": "image/png"},
            PDF: {"type": "file", "base64": coded(PDF), "mime_type": "application/pdf", "filename": "a.pdf"},
        }
        content = said if isinstance(said, str) else [parts.get(p) or {"type": "text", "text": p} for p in said]
        return self.model(model).invoke([{"role": "user", "content": content}]).text

    def stream(self, model: str) -> Generator[str]:
        yield from (chunk.text for chunk in self.model(model).stream(HELLO) if chunk.text)

    def tool(self, model: str) -> Any:
        from langchain_core.messages import HumanMessage
        from langchain_core.tools import tool

        weather = tool(get_weather)
        bound = self.model(model).bind_tools([weather])
        messages: list[Any] = [HumanMessage(HELLO)]
        messages.append(bound.invoke(messages))
        messages += [weather.invoke(call) for call in messages[-1].tool_calls]
        return bound.invoke(messages).text

    def turn(self, model: str) -> Any:
        from langchain_core.messages import HumanMessage

        messages: list[Any] = [HumanMessage(HELLO)]
        messages.append(self.model(model).invoke(messages))
        return self.model(model).invoke([*messages, HumanMessage(AND_NOW)]).text

    def record(self, model: str) -> Any:
        return self.model(model).with_structured_output(Weather).invoke(HELLO).model_dump()


class LangChainChat(LangChain):
    name = "langchain-openai, Chat"
    needs = "langchain_openai"
    responses: ClassVar[bool] = False

    def __init__(self, gateway: str) -> None:
        from langchain_openai import ChatOpenAI

        options: Any = {"base_url": f"{gateway}/v1", "api_key": "any", "use_responses_api": self.responses}
        self.model = lambda model: ChatOpenAI(model=model, **options)


class LangChainResponses(LangChainChat):
    name = "langchain-openai, Responses"
    responses = True


class LangChainAnthropic(LangChain):
    name = "langchain-anthropic"
    needs = "langchain_anthropic"

    def __init__(self, gateway: str) -> None:
        from langchain_anthropic import ChatAnthropic

        options: Any = {"base_url": f"{gateway}/anthropic", "api_key": "any"}
        self.model = lambda model: ChatAnthropic(**options, model=model)  # pyright: ignore[reportCallIssue]


class LangChainGoogle(LangChain):
    name = "langchain-google-genai"
    needs = "langchain_google_genai"

    def __init__(self, gateway: str) -> None:
        from langchain_google_genai import ChatGoogleGenerativeAI

        options: Any = {"base_url": f"{gateway}/gemini", "api_key": "any"}
        self.model = lambda model: ChatGoogleGenerativeAI(**options, model=model)


# --- LlamaIndex -------------------------------------------------------------------------------------------------------


class LlamaIndex(Client):
    model: Any

    def _messages(self, *said: Any) -> list[Any]:
        from llama_index.core.llms import ChatMessage, DocumentBlock, ImageBlock, TextBlock

        parts = {PNG: ImageBlock(image=PNG, image_mimetype="image/png")}
        parts |= {PDF: DocumentBlock(data=PDF, document_mimetype="application/pdf", title="a.pdf")}
        blocks = [[TextBlock(text=s)] if isinstance(s, str) else [parts.get(p) or TextBlock(text=p) for p in s]
                  for s in said]  # fmt: skip
        return [ChatMessage(role="user", blocks=each) for each in blocks]

    def ask(self, model: str, said: Any) -> Any:
        return self.model(model).chat(self._messages(said)).message.content

    def stream(self, model: str) -> Generator[str]:
        yield from (each.delta for each in self.model(model).stream_chat(self._messages(HELLO)) if each.delta)

    async def tool(self, model: str) -> Any:
        from llama_index.core.agent.workflow import FunctionAgent
        from llama_index.core.tools import FunctionTool

        tools = [FunctionTool.from_defaults(get_weather)]
        return str(await FunctionAgent(tools=tools, llm=self.model(model), streaming=False).run(HELLO))

    def turn(self, model: str) -> Any:
        hello, and_now = self._messages(HELLO, AND_NOW)
        first = self.model(model).chat([hello]).message
        return self.model(model).chat([hello, first, and_now]).message.content

    def record(self, model: str) -> Any:
        return self.model(model).as_structured_llm(Weather).complete(HELLO).raw.model_dump()


def know_models() -> None:
    """It knows the size of each model's context, and what the model can, by its name."""
    from llama_index.llms.openai import utils

    for models in (utils.ALL_AVAILABLE_MODELS, utils.CHAT_MODELS):
        models.update({f"{api}/{feature}": 128_000 for api in APIS for feature in MODELS})


class LlamaIndexOpenAI(LlamaIndex):
    name = "llama-index, OpenAI"
    needs = "llama_index.llms.openai"

    def __init__(self, gateway: str) -> None:
        from llama_index.llms.openai import OpenAI

        know_models()
        self.model = lambda model: OpenAI(model=model, api_base=f"{gateway}/v1", api_key="any")


class LlamaIndexResponses(LlamaIndex):
    name = "llama-index, OpenAIResponses"
    fails: ClassVar[dict[str, str]] = {"cut": "it ends as if whole"}
    leaves = False
    """It closes its connection when Python collects it."""
    needs = "llama_index.llms.openai"

    def __init__(self, gateway: str) -> None:
        from llama_index.llms.openai import OpenAIResponses

        know_models()
        self.model = lambda model: OpenAIResponses(model=model, api_base=f"{gateway}/v1", api_key="any")


class LlamaIndexAnthropic(LlamaIndex):
    name = "llama-index, Anthropic"
    needs = "llama_index.llms.anthropic"

    def __init__(self, gateway: str) -> None:
        from llama_index.llms.anthropic import Anthropic, base, utils

        # It knows the size of each model's context, and whether it calls functions, by its name.
        base.is_function_calling_model = lambda modelname: True
        utils.CLAUDE_MODELS.update({f"{api}/{feature}": 200_000 for api in APIS for feature in MODELS})
        self.model = lambda model: Anthropic(model=model, base_url=f"{gateway}/anthropic", api_key="any")


class LlamaIndexGoogle(LlamaIndex):
    name = "llama-index, GoogleGenAI"
    needs = "llama_index.llms.google_genai"

    def __init__(self, gateway: str) -> None:
        from google.genai.types import HttpOptions
        from llama_index.llms.google_genai import GoogleGenAI

        options = HttpOptions(base_url=f"{gateway}/gemini")
        self.model = lambda model: GoogleGenAI(model=model, api_key="any", http_options=options)


# --- pydantic-ai ------------------------------------------------------------------------------------------------------


class PydanticAI(Client):
    needs = "pydantic_ai"
    model: Any

    def _agent(self, model: str, **more: Any) -> Any:
        from pydantic_ai import Agent

        return Agent(self.model(model), **more)

    async def ask(self, model: str, said: Any) -> Any:
        from pydantic_ai import BinaryContent

        parts = {PNG: BinaryContent(PNG, media_type="image/png"), PDF: BinaryContent(PDF, media_type="application/pdf")}
        prompt = said if isinstance(said, str) else [parts.get(p) or p for p in said]
        return (await self._agent(model).run(prompt)).output

    async def stream(self, model: str) -> AsyncGenerator[str]:
        async with self._agent(model).run_stream(HELLO) as stream:
            async for text in stream.stream_text(delta=True, debounce_by=None):
                yield text

    async def tool(self, model: str) -> Any:
        return (await self._agent(model, tools=[get_weather]).run(HELLO)).output

    async def turn(self, model: str) -> Any:
        first = await self._agent(model).run(HELLO)
        return (await self._agent(model).run(AND_NOW, message_history=first.all_messages())).output

    async def record(self, model: str) -> Any:
        return (await self._agent(model, output_type=Weather).run(HELLO)).output.model_dump()


class PydanticChat(PydanticAI):
    name = "pydantic-ai, OpenAIChatModel"

    def __init__(self, gateway: str) -> None:
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        options: Any = {"base_url": f"{gateway}/v1", "api_key": "any"}
        self.model = lambda model: OpenAIChatModel(model, provider=OpenAIProvider(**options))


class PydanticResponses(PydanticAI):
    name = "pydantic-ai, OpenAIResponsesModel"

    def __init__(self, gateway: str) -> None:
        from pydantic_ai.models.openai import OpenAIResponsesModel
        from pydantic_ai.providers.openai import OpenAIProvider

        options: Any = {"base_url": f"{gateway}/v1", "api_key": "any"}
        self.model = lambda model: OpenAIResponsesModel(model, provider=OpenAIProvider(**options))


class PydanticAnthropic(PydanticAI):
    name = "pydantic-ai, AnthropicModel"

    def __init__(self, gateway: str) -> None:
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        options: Any = {"base_url": f"{gateway}/anthropic", "api_key": "any"}
        self.model = lambda model: AnthropicModel(model, provider=AnthropicProvider(**options))


class PydanticGoogle(PydanticAI):
    name = "pydantic-ai, GoogleModel"

    def __init__(self, gateway: str) -> None:
        from pydantic_ai.models.google import GoogleModel
        from pydantic_ai.providers.google import GoogleProvider

        options: Any = {"base_url": f"{gateway}/gemini", "api_key": "any"}
        self.model = lambda model: GoogleModel(model, provider=GoogleProvider(**options))


# --- openai-agents ----------------------------------------------------------------------------------------------------


class OpenAIAgents(Client):
    needs = "agents"
    kind: ClassVar[str]

    def __init__(self, gateway: str) -> None:
        import agents

        agents.set_tracing_disabled(True)
        self._gateway = gateway

    def _agent(self, model: str, **more: Any) -> Any:
        import agents
        import openai

        api = openai.AsyncOpenAI(base_url=f"{self._gateway}/v1", api_key="any")
        return agents.Agent(name="Ann", model=getattr(agents, self.kind)(model, api), **more)

    async def ask(self, model: str, said: Any) -> Any:
        from agents import Runner

        parts = {
            PNG: {"type": "input_image", "detail": "auto", "image_url": f"data:image/png;base64,{coded(PNG)}"},
            PDF: {"type": "input_file", "filename": "a.pdf", "file_data": f"data:application/pdf;base64,{coded(PDF)}"},
        }
        content: Any = [parts.get(p) or {"type": "input_text", "text": p} for p in said]
        asked: Any = said if isinstance(said, str) else [{"role": "user", "content": content}]
        return (await Runner.run(self._agent(model), asked)).final_output

    async def stream(self, model: str) -> AsyncGenerator[str]:
        from agents import Runner

        result = Runner.run_streamed(self._agent(model), HELLO)
        try:
            async for event in result.stream_events():
                if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                    yield event.data.delta
        finally:
            result.cancel()

    async def tool(self, model: str) -> Any:
        from agents import Runner, function_tool

        return (await Runner.run(self._agent(model, tools=[function_tool(get_weather)]), HELLO)).final_output

    async def turn(self, model: str) -> Any:
        from agents import Runner

        first = await Runner.run(self._agent(model), HELLO)
        more: Any = [*first.to_input_list(), {"role": "user", "content": AND_NOW}]
        return (await Runner.run(self._agent(model), more)).final_output

    async def record(self, model: str) -> Any:
        from agents import Runner

        return (await Runner.run(self._agent(model, output_type=Weather), HELLO)).final_output.model_dump()


class AgentsChat(OpenAIAgents):
    name = "openai-agents, Chat"
    kind = "OpenAIChatCompletionsModel"


class AgentsResponses(OpenAIAgents):
    name = "openai-agents, Responses"
    kind = "OpenAIResponsesModel"


CLIENTS = (
    LangChainChat,
    LangChainResponses,
    LangChainAnthropic,
    LangChainGoogle,
    LlamaIndexOpenAI,
    LlamaIndexResponses,
    LlamaIndexAnthropic,
    LlamaIndexGoogle,
    PydanticChat,
    PydanticResponses,
    PydanticAnthropic,
    PydanticGoogle,
    AgentsChat,
    AgentsResponses,
)
