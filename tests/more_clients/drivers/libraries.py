"""Libraries that speak to several providers."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any, ClassVar

from tests.more_clients.drivers.official import SCHEMA, URLS, OpenAIChat
from tests.more_clients.features import AND_NOW, HELLO, PDF, PNG, Client, Weather, coded, get_weather

# --- LiteLLM as a client ----------------------------------------------------------------------------------------------


class LiteLLM(Client):
    name = "litellm, openai"
    needs = "litellm"
    provider: ClassVar[str] = "openai"
    path: ClassVar[str] = "/v1"
    said = OpenAIChat.said

    def __init__(self, gateway: str) -> None:
        os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would load a list of prices
        self._base = gateway + self.path

    def _create(self, model: str, messages: list[Any], **more: Any) -> Any:
        import litellm

        options: Any = {"api_base": self._base, "api_key": "any", **more}
        return litellm.completion(f"{self.provider}/{model}", messages, **options)

    def ask(self, model: str, said: Any) -> Any:
        return self._create(model, [{"role": "user", "content": self.said(said)}]).choices[0].message.content

    def stream(self, model: str) -> Generator[str]:
        chunks = self._create(model, [{"role": "user", "content": HELLO}], stream=True)
        try:
            yield from (text for chunk in chunks if chunk.choices and (text := chunk.choices[0].delta.content))
        finally:
            getattr(chunks.completion_stream, "close", lambda: None)()

    def tool(self, model: str) -> Any:
        tools = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
        messages: list[Any] = [{"role": "user", "content": HELLO}]
        messages.append(self._create(model, messages, tools=tools).choices[0].message)
        (call,) = messages[-1].tool_calls
        messages.append({"role": "tool", "tool_call_id": call.id, "content": get_weather("Bonn")})
        return self._create(model, messages, tools=tools).choices[0].message.content

    def turn(self, model: str) -> Any:
        messages: list[Any] = [{"role": "user", "content": HELLO}]
        messages.append(self._create(model, messages).choices[0].message)
        return self._create(model, [*messages, {"role": "user", "content": AND_NOW}]).choices[0].message.content

    def record(self, model: str) -> Any:
        answer = self._create(model, [{"role": "user", "content": HELLO}], response_format=Weather)
        return Weather.model_validate_json(answer.choices[0].message.content).model_dump()


class LiteLLMAnthropic(LiteLLM):
    name = "litellm, anthropic"
    provider, path = "anthropic", "/anthropic"


class LiteLLMGoogle(LiteLLM):
    name = "litellm, gemini"
    provider, path = "gemini", "/gemini/v1beta"


# --- DSPy -------------------------------------------------------------------------------------------------------------


class DSPy(Client):
    name = "dspy"
    needs = "dspy"

    def __init__(self, gateway: str) -> None:
        os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
        self._base = f"{gateway}/v1"

    def _lm(self, model: str) -> Any:
        import dspy

        return dspy.LM(f"openai/{model}", api_base=self._base, api_key="any", cache=False, num_retries=0)

    def ask(self, model: str, said: Any) -> Any:
        content = said if isinstance(said, str) else OpenAIChat.said(self, said)  # type: ignore[arg-type]
        (answer,) = self._lm(model)(messages=[{"role": "user", "content": content}])
        return answer["text"] if isinstance(answer, dict) else answer

    stream = None

    def record(self, model: str) -> Any:
        import dspy

        with dspy.context(lm=self._lm(model), adapter=dspy.JSONAdapter()):
            found = dspy.Predict("question -> city: str, rain: bool")(question=HELLO)
        return {"city": found.city, "rain": found.rain}


# --- Instructor -------------------------------------------------------------------------------------------------------


class Instructor(Client):
    needs = "instructor"
    stream = None
    ask = None
    files = ()

    def record(self, model: str) -> Any:
        return self.fields(model).model_dump()

    fields: Callable[[str], Any]


class InstructorOpenAI(Instructor):
    name = "instructor, OpenAI"

    def __init__(self, gateway: str) -> None:
        import instructor
        import openai

        api: Any = instructor.from_openai(openai.OpenAI(base_url=f"{gateway}/v1", api_key="any"))
        messages = [{"role": "user", "content": HELLO}]
        self.fields = lambda model: api.create(model=model, response_model=Weather, messages=messages)


class InstructorAnthropic(Instructor):
    name = "instructor, Anthropic"

    def __init__(self, gateway: str) -> None:
        import anthropic
        import instructor

        api: Any = instructor.from_anthropic(anthropic.Anthropic(base_url=f"{gateway}/anthropic", api_key="any"))
        messages = [{"role": "user", "content": HELLO}]
        self.fields = lambda model: api.create(model=model, max_tokens=99, response_model=Weather, messages=messages)


class InstructorGoogle(Instructor):
    name = "instructor, Google"

    def __init__(self, gateway: str) -> None:
        import instructor
        from google import genai

        options = genai.types.HttpOptions(base_url=f"{gateway}/gemini")
        self._api = genai.Client(api_key="any", http_options=options)
        api: Any = instructor.from_genai(self._api)
        messages = [{"role": "user", "content": HELLO}]
        self.fields = lambda model: api.create(model=model, response_model=Weather, messages=messages)


# --- Haystack ---------------------------------------------------------------------------------------------------------


class Haystack(Client):
    schema: ClassVar[str] = "response_format"
    variables: ClassVar[dict[str, str]] = {}
    kind: Callable[..., Any]

    def _run(self, model: str, messages: list[Any], **more: Any) -> Any:
        (reply,) = self.kind(model=model).run(messages, **more)["replies"]
        return reply

    def ask(self, model: str, said: Any) -> Any:
        from haystack.dataclasses import ChatMessage, FileContent, ImageContent

        parts = {
            PNG: ImageContent(coded(PNG), mime_type="image/png"),
            PDF: FileContent(coded(PDF), mime_type="application/pdf", filename="a.pdf"),
        }
        content: Any = [said] if isinstance(said, str) else [parts.get(p) or p for p in said]
        return self._run(model, [ChatMessage.from_user(content_parts=content)]).text

    def stream(self, model: str) -> Generator[str]:
        """Its callback is called in a thread."""
        from haystack.dataclasses import ChatMessage

        found: queue.Queue[Any] = queue.Queue()

        def run() -> None:
            try:
                self._run(model, [ChatMessage.from_user(HELLO)], streaming_callback=lambda c: found.put(c.content))
                found.put(None)
            except Exception as e:
                found.put(e)

        threading.Thread(target=run, daemon=True).start()
        while (piece := found.get(timeout=60)) is not None:
            if isinstance(piece, Exception):
                raise piece
            if piece:
                yield piece

    def tool(self, model: str) -> Any:
        from haystack.dataclasses import ChatMessage
        from haystack.tools.tool import Tool

        tools = [Tool(name="get_weather", description="Weather", parameters=SCHEMA, function=get_weather)]
        messages = [ChatMessage.from_user(HELLO)]
        messages.append(self._run(model, messages, tools=tools))
        (call,) = messages[-1].tool_calls
        messages.append(ChatMessage.from_tool(get_weather("Bonn"), origin=call))
        return self._run(model, messages, tools=tools).text

    def turn(self, model: str) -> Any:
        from haystack.dataclasses import ChatMessage

        messages = [ChatMessage.from_user(HELLO)]
        messages.append(self._run(model, messages))
        return self._run(model, [*messages, ChatMessage.from_user(AND_NOW)]).text

    leaves = False
    """A callback cannot stop the stream."""


class HaystackOpenAI(Haystack):
    name = "haystack, OpenAI"
    needs = "haystack"

    def __init__(self, gateway: str) -> None:
        from haystack.components.generators.chat import OpenAIChatGenerator
        from haystack.utils import Secret

        key = Secret.from_token("any")
        self.kind = lambda model: OpenAIChatGenerator(api_key=key, model=model, api_base_url=f"{gateway}/v1")

    def record(self, model: str) -> Any:
        from haystack.dataclasses import ChatMessage

        options = {"response_format": Weather}
        text = self._run(model, [ChatMessage.from_user(HELLO)], generation_kwargs=options).text
        return Weather.model_validate_json(text).model_dump()


class HaystackAnthropic(Haystack):
    name = "haystack, Anthropic"
    needs = "haystack_integrations.components.generators.anthropic"

    def __init__(self, gateway: str) -> None:
        from haystack.utils import Secret
        from haystack_integrations.components.generators.anthropic import AnthropicChatGenerator

        os.environ["ANTHROPIC_BASE_URL"] = f"{gateway}/anthropic"  # it has no parameter for it
        self.kind = lambda model: AnthropicChatGenerator(api_key=Secret.from_token("any"), model=model)


class HaystackGoogle(Haystack):
    name = "haystack, Google"
    needs = "haystack_integrations.components.generators.google_genai"

    def __init__(self, gateway: str) -> None:
        from haystack.utils import Secret
        from haystack_integrations.components.generators.google_genai import GoogleGenAIChatGenerator

        os.environ["GOOGLE_GEMINI_BASE_URL"] = f"{gateway}/gemini"
        self.kind = lambda model: GoogleGenAIChatGenerator(api_key=Secret.from_token("any"), model=model)


# --- smolagents -------------------------------------------------------------------------------------------------------


class Smolagents(Client):
    name = "smolagents"
    needs = "smolagents"
    files = ()

    def __init__(self, gateway: str) -> None:
        from smolagents import OpenAIModel

        self.model = lambda model: OpenAIModel(model, api_base=f"{gateway}/v1", api_key="any")

    def _said(self, *said: str) -> list[Any]:
        roles = ("user", "assistant")
        return [{"role": roles[n % 2], "content": [{"type": "text", "text": s}]} for n, s in enumerate(said)]

    def ask(self, model: str, said: Any) -> Any:
        return self.model(model).generate(self._said(said)).content

    def stream(self, model: str) -> Generator[str]:
        deltas = self.model(model).generate_stream(self._said(HELLO))
        yield from (delta.content for delta in deltas if delta.content)

    def tool(self, model: str) -> Any:
        from smolagents import ToolCallingAgent, tool

        agent = ToolCallingAgent(tools=[tool(get_weather)], model=self.model(model), max_steps=3, verbosity_level=0)
        return agent.run(HELLO)

    def turn(self, model: str) -> Any:
        first = self.ask(model, HELLO)
        return self.model(model).generate(self._said(HELLO, first, AND_NOW)).content


# --- Semantic Kernel --------------------------------------------------------------------------------------------------


class SemanticKernel(Client):
    needs = "semantic_kernel"
    service: Callable[[str], tuple[Any, Any]]
    """A service and its settings."""
    files = (PNG,)

    async def _answer(self, model: str, history: Any, **more: Any) -> Any:
        from semantic_kernel import Kernel

        service, settings = self.service(model)
        for name, value in more.items():
            setattr(settings, name, value)
        kernel = Kernel()
        kernel.add_function("sky", _kernel_function())
        return await service.get_chat_message_content(history, settings, kernel=kernel)

    async def ask(self, model: str, said: Any) -> Any:
        from semantic_kernel.contents import ChatHistory, ChatMessageContent, ImageContent, TextContent

        parts = {PNG: ImageContent(data_uri=URLS[PNG])}
        said = (said,) if isinstance(said, str) else said
        items: Any = [parts.get(p) or TextContent(text=p) for p in said]
        return str(await self._answer(model, ChatHistory(messages=[ChatMessageContent(role="user", items=items)])))  # type: ignore[arg-type]

    async def stream(self, model: str) -> AsyncGenerator[str]:
        from semantic_kernel.contents import ChatHistory

        history = ChatHistory()
        history.add_user_message(HELLO)
        service, settings = self.service(model)
        async for message in service.get_streaming_chat_message_content(history, settings):
            if message and str(message):
                yield str(message)

    async def tool(self, model: str) -> Any:
        from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
        from semantic_kernel.contents import ChatHistory

        history = ChatHistory()
        history.add_user_message(HELLO)
        return str(await self._answer(model, history, function_choice_behavior=FunctionChoiceBehavior.Auto()))

    async def turn(self, model: str) -> Any:
        from semantic_kernel.contents import ChatHistory

        history = ChatHistory()
        history.add_user_message(HELLO)
        history.add_message(await self._answer(model, history))
        history.add_user_message(AND_NOW)
        return str(await self._answer(model, history))


def _kernel_function() -> Any:
    from semantic_kernel.functions import KernelFunctionFromMethod, kernel_function

    return KernelFunctionFromMethod(kernel_function(get_weather, name="get_weather"), plugin_name="sky")


class SemanticKernelOpenAI(SemanticKernel):
    name = "semantic-kernel, OpenAI"

    def __init__(self, gateway: str) -> None:
        import openai
        from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings

        def service(model: str) -> tuple[Any, Any]:
            api = openai.AsyncOpenAI(base_url=f"{gateway}/v1", api_key="any")
            return OpenAIChatCompletion(model, async_client=api), OpenAIChatPromptExecutionSettings()

        self.service = service

    async def record(self, model: str) -> Any:
        from semantic_kernel.contents import ChatHistory

        history = ChatHistory()
        history.add_user_message(HELLO)
        text = str(await self._answer(model, history, response_format=Weather))
        return Weather.model_validate_json(text).model_dump()


class SemanticKernelAnthropic(SemanticKernel):
    name = "semantic-kernel, Anthropic"
    files = ()

    def __init__(self, gateway: str) -> None:
        import anthropic
        from semantic_kernel.connectors.ai.anthropic import (
            AnthropicChatCompletion,
            AnthropicChatPromptExecutionSettings,
        )

        def service(model: str) -> tuple[Any, Any]:
            api = anthropic.AsyncAnthropic(base_url=f"{gateway}/anthropic", api_key="any")
            return AnthropicChatCompletion(
                model, api_key="any", async_client=api
            ), AnthropicChatPromptExecutionSettings()

        self.service = service


CLIENTS = (
    LiteLLM,
    LiteLLMAnthropic,
    LiteLLMGoogle,
    DSPy,
    InstructorOpenAI,
    InstructorAnthropic,
    InstructorGoogle,
    HaystackOpenAI,
    HaystackAnthropic,
    HaystackGoogle,
    Smolagents,
    SemanticKernelOpenAI,
    SemanticKernelAnthropic,
)
