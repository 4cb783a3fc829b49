"""The SDKs of the providers for Python."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from tests.more_clients.features import AND_NOW, HELLO, PDF, PNG, Client, Weather, coded, get_weather

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
URLS = {PNG: f"data:image/png;base64,{coded(PNG)}", PDF: f"data:application/pdf;base64,{coded(PDF)}"}


class OpenAIChat(Client):
    name = "openai, Chat"
    needs = "openai"

    def __init__(self, gateway: str) -> None:
        import openai

        self.api = openai.OpenAI(base_url=f"{gateway}/v1", api_key="any")

    def said(self, said: Any) -> Any:
        file = {"type": "file", "file": {"filename": "a.pdf", "file_data": URLS[PDF]}}
        parts = {PNG: {"type": "image_url", "image_url": {"url": URLS[PNG]}}, PDF: file}
        return said if isinstance(said, str) else [parts.get(p) or {"type": "text", "text": p} for p in said]

    def _create(self, model: str, messages: list[Any], **more: Any) -> Any:
        return self.api.chat.completions.create(model=model, messages=messages, **more).choices[0].message

    def ask(self, model: str, said: Any) -> Any:
        return self._create(model, [{"role": "user", "content": self.said(said)}]).content

    def stream(self, model: str) -> Generator[str]:
        messages: Any = [{"role": "user", "content": HELLO}]
        with self.api.chat.completions.create(model=model, messages=messages, stream=True) as chunks:
            for chunk in chunks:
                if chunk.choices and (text := chunk.choices[0].delta.content):
                    yield text

    def tool(self, model: str) -> Any:
        tools = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
        messages: list[Any] = [{"role": "user", "content": HELLO}]
        messages.append(self._create(model, messages, tools=tools))
        (call,) = messages[-1].tool_calls
        messages.append({"role": "tool", "tool_call_id": call.id, "content": get_weather("Bonn")})
        return self._create(model, messages, tools=tools).content

    def turn(self, model: str) -> Any:
        messages: list[Any] = [{"role": "user", "content": HELLO}]
        messages.append(self._create(model, messages))
        return self._create(model, [*messages, {"role": "user", "content": AND_NOW}]).content

    def record(self, model: str) -> Any:
        messages: Any = [{"role": "user", "content": HELLO}]
        parsed = self.api.chat.completions.parse(model=model, messages=messages, response_format=Weather)
        assert parsed.choices[0].message.parsed
        return parsed.choices[0].message.parsed.model_dump()


class OpenAIResponses(Client):
    name = "openai, Responses"
    needs = "openai"

    def __init__(self, gateway: str) -> None:
        import openai

        self.api = openai.OpenAI(base_url=f"{gateway}/v1", api_key="any")

    def ask(self, model: str, said: Any) -> Any:
        file = {"type": "input_file", "filename": "a.pdf", "file_data": URLS[PDF]}
        parts = {PNG: {"type": "input_image", "image_url": URLS[PNG]}, PDF: file}
        content = said if isinstance(said, str) else [parts.get(p) or {"type": "input_text", "text": p} for p in said]
        asked: Any = [{"role": "user", "content": content}]
        return self.api.responses.create(model=model, input=asked).output_text

    def stream(self, model: str) -> Generator[str]:
        with self.api.responses.stream(model=model, input=HELLO) as events:
            for event in events:
                if event.type == "response.output_text.delta":
                    yield event.delta
            assert events.get_final_response().status == "completed"

    def tool(self, model: str) -> Any:
        tools: Any = [{"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": False}]
        said: list[Any] = [{"role": "user", "content": HELLO}]
        first = self.api.responses.create(model=model, input=said, tools=tools)
        (call,) = (item for item in first.output if item.type == "function_call")
        output = {"type": "function_call_output", "call_id": call.call_id, "output": get_weather("Bonn")}
        said += [*first.output, output]
        return self.api.responses.create(model=model, input=said, tools=tools).output_text

    def turn(self, model: str) -> Any:
        first = self.api.responses.create(model=model, input=HELLO)
        return self.api.responses.create(model=model, input=AND_NOW, previous_response_id=first.id).output_text

    def record(self, model: str) -> Any:
        parsed = self.api.responses.parse(model=model, input=HELLO, text_format=Weather).output_parsed
        assert parsed
        return parsed.model_dump()


class Anthropic(Client):
    name = "anthropic"
    needs = "anthropic"

    def __init__(self, gateway: str) -> None:
        import anthropic

        self.api = anthropic.Anthropic(base_url=f"{gateway}/anthropic", api_key="any")

    def _create(self, model: str, messages: list[Any], **more: Any) -> Any:
        return self.api.messages.create(model=model, max_tokens=99, messages=messages, **more)

    def _text(self, message: Any) -> str:
        return "".join(block.text for block in message.content if block.type == "text")

    def ask(self, model: str, said: Any) -> Any:
        def block(kind: str, media_type: str, data: bytes) -> Any:
            return {"type": kind, "source": {"type": "base64", "media_type": media_type, "data": coded(data)}}

        parts = {PNG: block("image", "image/png", PNG), PDF: block("document", "application/pdf", PDF)}
        content = said if isinstance(said, str) else [parts.get(p) or {"type": "text", "text": p} for p in said]
        return self._text(self._create(model, [{"role": "user", "content": content}]))

    def stream(self, model: str) -> Generator[str]:
        messages: Any = [{"role": "user", "content": HELLO}]
        with self.api.messages.stream(model=model, max_tokens=99, messages=messages) as stream:
            yield from stream.text_stream
            assert stream.get_final_message().stop_reason == "end_turn"

    def tool(self, model: str) -> Any:
        from anthropic import beta_tool

        run: Any = self.api.beta.messages.tool_runner
        messages = [{"role": "user", "content": HELLO}]
        return self._text([*run(model=model, max_tokens=99, tools=[beta_tool(get_weather)], messages=messages)][-1])

    def turn(self, model: str) -> Any:
        messages: list[Any] = [{"role": "user", "content": HELLO}]
        first = self._create(model, messages)
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": AND_NOW}]
        return self._text(self._create(model, messages))

    def record(self, model: str) -> Any:
        messages: Any = [{"role": "user", "content": HELLO}]
        parsed = self.api.messages.parse(model=model, max_tokens=99, messages=messages, output_format=Weather)
        assert parsed.parsed_output
        return parsed.parsed_output.model_dump()


class Google(Client):
    name = "google-genai"
    needs = "google.genai"

    def __init__(self, gateway: str) -> None:
        from google import genai

        options = genai.types.HttpOptions(base_url=f"{gateway}/gemini")
        self.api = genai.Client(api_key="any", http_options=options)

    def ask(self, model: str, said: Any) -> Any:
        from google.genai.types import Part

        parts = {PNG: Part.from_bytes(data=PNG, mime_type="image/png")}
        parts |= {PDF: Part.from_bytes(data=PDF, mime_type="application/pdf")}
        contents: Any = said if isinstance(said, str) else [parts.get(p) or p for p in said]
        return self.api.models.generate_content(model=model, contents=contents).text

    def stream(self, model: str) -> Generator[str]:
        chunks = self.api.models.generate_content_stream(model=model, contents=HELLO)
        yield from (chunk.text for chunk in chunks if chunk.text)

    def tool(self, model: str) -> Any:
        return self.api.models.generate_content(model=model, contents=HELLO, config={"tools": [get_weather]}).text

    def turn(self, model: str) -> Any:
        chat = self.api.chats.create(model=model)
        chat.send_message(HELLO)
        return chat.send_message(AND_NOW).text

    def record(self, model: str) -> Any:
        config: Any = {"response_mime_type": "application/json", "response_schema": Weather}
        parsed: Any = self.api.models.generate_content(model=model, contents=HELLO, config=config).parsed
        return parsed.model_dump()


CLIENTS = (OpenAIChat, OpenAIResponses, Anthropic, Google)
