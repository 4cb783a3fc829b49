"""OpenAI's Chat Completions API and compatible services. Vendor differences are data (`Quirks`)."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from tokenbus.errors import RequestInvalid
from tokenbus.events.requests import Generate, Message, Mode
from tokenbus.providers.api import ApiName, Built, Decoder, Format, Provider, Quirks
from tokenbus.providers.base import ProviderBase
from tokenbus.providers.file_api import FileApi
from tokenbus.providers.media import COMMON_IMAGES, MIB, MediaLimits
from tokenbus.providers.openai_chat.answer import RepeatedThinking
from tokenbus.providers.openai_chat.request import ChatMessage, build, built, limits, max_stops, user_content
from tokenbus.providers.openai_chat.stream import ChatDecoder
from tokenbus.providers.openai_responses.files import chat_files
from tokenbus.providers.request.participants import end_of_turn, provider_stops
from tokenbus.providers.request.transcript import opening_of, system_text, transcribe
from tokenbus.providers.response.inline_thinking import InlineThinking


def build_prefill(request: Generate, history: list[Message], quirks: Quirks) -> Built:
    """Build the HTTP call for the next turn. Raises RequestInvalid, naming the field. Thinking is written into the
    text.
    """
    if not quirks.continues:
        raise RequestInvalid("mode", "this provider cannot continue a text (its quirk `continues` is not set)")
    token = end_of_turn(request, quirks)
    transcript = transcribe(request, history, token)
    system = system_text(request)
    body: dict[str, object] = {"model": request.model, "stream": request.stream}
    path = "/completions"
    if quirks.continues == "completions":
        if transcript.before:
            raise RequestInvalid("messages", "this provider's completions accept only text, not images or documents")
        body["prompt"] = f"{system}\n\n{transcript.text}" if system else transcript.text
        quirks = msgspec.structs.replace(quirks, max_tokens_field="max_tokens")  # this endpoint has no other field
    else:
        path = "/chat/completions"
        messages: list[ChatMessage] = [{"role": quirks.system_role, "content": system}] if system else []
        messages.append({"role": "user", "content": user_content(opening_of(request, transcript), quirks)})
        messages.append({"role": "assistant", "content": transcript.text.rstrip(), **quirks.continued})
        body |= {"messages": messages, **quirks.continuing}
    if request.stream and quirks.stream_usage:
        body["stream_options"] = {"include_usage": True}
    stop = provider_stops(request, token, max_stops(quirks))
    body |= limits(msgspec.structs.replace(request, thinking=None, stop=stop), quirks)
    return built(path, body, request, transcript.notes)


class OpenAIChat(ProviderBase):
    """Chat Completions as a `tokenbus.providers.api.Provider`."""

    name: ApiName = "openai-chat"
    decodes = ChatDecoder
    default_base_url = "https://api.openai.com/v1"
    default_key_env = "OPENAI_API_KEY"
    # End of text, start of a tool call, end of the response. No byte pattern marks the start of a text.
    urgent: tuple[bytes, ...] = (
        b'"finish_reason":"',
        b'"finish_reason": "',
        b'"type":"function"',
        b"[DONE]",
        b'"error"',
    )
    files: FileApi | None = chat_files
    last: tuple[bytes, ...] = (b"data:[DONE]", b'data:{"error":{"')
    image_keys: re.Pattern[bytes] | None = re.compile(rb'"url"\s{0,32}:\s{0,32}"data:image/[a-z0-9.+-]{1,40};base64,')
    formats: Mapping[Mode, Format] = {"chat": build, "prefill": build_prefill}
    # https://developers.openai.com/api/docs/guides/images-vision, "Image input requirements": four types, 1,500 images
    # and 512 MB per request (50 MB and 500 in 2025). …/guides/file-inputs and …/guides/pdf-files: Chat Completions
    # takes only PDFs, each file and all files of a request under 50 MB.
    media = MediaLimits(
        image_types=COMMON_IMAGES,
        document_types=("application/pdf",),
        document_bytes=50 * MIB,
        images=1500,
        request_bytes=512 * MIB,
    )
    options = frozenset(
        {
            "json_object",
            "parallel_tool_calls",
            "seed",
            "frequency_penalty",
            "presence_penalty",
            "user_id",
            "strict_tools",
            "free_text_tools",
        }
    )

    def continues(self, request: Generate, quirks: Quirks) -> bool:
        """See `Provider.continues`. A chat template that opens the thinking tag does not do so when it continues a
        message.
        """
        return quirks.continues == "message" and not quirks.inline_thinking_opened

    def decoder(self, *, status: int, headers: Mapping[str, str], stream: bool, quirks: Quirks) -> Decoder:
        """See `Provider.decoder`. A whole response has a `message` instead of a `delta`."""
        return ChatDecoder.of(
            status,
            headers,
            inline=InlineThinking.of(quirks),
            reasoning_fields=quirks.reasoning_fields,
            echo=RepeatedThinking.of(quirks),
        )


provider: Provider = OpenAIChat()
