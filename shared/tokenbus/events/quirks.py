"""A provider's API and how the provider deviates from it: data that travels with an attempt."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

ApiName = str
"""One of `BUILT_IN`, or a name registered by a package (`tokenbus.providers.plugins`)."""
BUILT_IN = ("anthropic", "openai-chat", "openai-responses", "openai-images", "gemini", "gemini-interactions")


TagName = Annotated[
    str, Meta(pattern=r"^[A-Za-z][A-Za-z0-9_:.-]{0,63}$(?!\n)", description="the name of a tag, without its brackets")
]


class ThinkingTags(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How some models write thinking into their text; see the fields of `Quirks` with the same names."""

    inline_thinking: tuple[TagName, ...] = ()
    inline_thinking_opened: bool = False
    unclosed_thinking: Literal["hold", "release"] = "hold"


class Quirks(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a vendor deviates from its API: data from `[providers.NAME.quirks]`, never code.

    The names of Claude models were read on 2026-11-25 against Anthropic's documents ("What's new in Claude Opus 5.5")
    and clients of its API.
    """

    reasoning_fields: tuple[str, ...] = ("reasoning_content", "reasoning", "reasoning_details")
    """Chat Completions: fields with reasoning text; the first one present wins."""
    max_tokens_field: str = "max_completion_tokens"
    """Chat Completions: the name of the output limit."""
    stream_usage: bool = True
    """Chat Completions: request usage in the stream (`stream_options.include_usage`)."""
    user_field: str = "user"
    """Chat Completions: the field of `user_id` (`safety_identifier` for OpenAI's own newer models)."""
    system_role: str = "system"
    """Chat Completions: the role of system text (`developer` for some)."""
    reasoning_back: str = ""
    """Chat Completions: the field in which thinking is sent back (`reasoning_content`, if a vendor wants it with its
    tool calls; `content`: as a part of the content); empty: only `reasoning_details` is sent back. Responses:
    `reasoning_text`, if a vendor wants plain reasoning back; empty: only encrypted reasoning is.
    """
    cache_marks: bool = False
    """Chat Completions: send cache marks as `cache_control` (OpenRouter); others reject the field. Responses: send them
    as `prompt_cache_breakpoint` (GPT-5.6 and later).
    """
    models_without_reasoning: tuple[str, ...] = ("gpt-3.5", "gpt-4", "chatgpt-")
    """Responses: name prefixes of models that do not reason and reject requests for encrypted reasoning."""
    models_with_budgets: tuple[str, ...] = (
        *("gemini-2", "claude-3-7", "claude-haiku-4-5", "claude-opus-4-0", "claude-opus-4-1", "claude-opus-4-2"),
        *("claude-opus-4-5", "claude-opus-4@", "claude-sonnet-4-0", "claude-sonnet-4-2", "claude-sonnet-4-5"),
        "claude-sonnet-4@",
    )
    """Anthropic and Gemini: name prefixes of models that take a thinking budget in tokens and no effort."""
    models_with_system_messages: tuple[str, ...] = (
        *("claude-opus-4-8", "claude-opus-5", "claude-sonnet-5-5", "claude-haiku-5", "claude-fable", "claude-mythos-5"),
    )
    """Anthropic: name prefixes of models that take system text behind a user message. For others it moves to the front.
    """
    models_always_thinking: tuple[str, ...] = ("claude-opus-5-5", "claude-fable")
    """Anthropic: name prefixes of models that refuse a thinking budget, which becomes an effort, and to turn thinking
    off, which becomes the effort `low`.
    """
    models_thinking_between_tools: tuple[str, ...] = ("claude-sonnet-5-5",)
    """Anthropic: name prefixes of models that turn thinking off but for notes between tool calls."""
    models_omitting_thinking: tuple[str, ...] = (
        *("claude-opus-4-7", "claude-opus-4-8", "claude-opus-5-5", "claude-mythos", "claude-fable"),
    )
    """Anthropic: name prefixes of models that send thinking without its text unless `thinking.display` is `summarized`.
    """
    models_without_signatures: tuple[str, ...] = ("gemini-1", "gemini-2")
    """Gemini: name prefixes of models that accept calls without a signature; others get a placeholder signature."""
    betas_in_body: bool = False
    """Anthropic: names of betas go into the body as `anthropic_beta`, for Bedrock, which ignores the header."""
    effort_field: str = "reasoning_effort"
    """Chat Completions: the field of the effort (`reasoning.effort` sets it inside an object); empty: none."""
    budget_field: str = ""
    """Chat Completions: the field of the thinking budget, in the same notation."""
    thinking_on: dict[str, object] = {}
    """Chat Completions: additional body fields that turn thinking on."""
    thinking_off: dict[str, object] = {}
    """Chat Completions: body fields that turn thinking off; empty: the effort `none`."""
    inline_thinking: tuple[TagName, ...] = ()
    """Names of the tags in which a model writes thinking into its text (`think`)."""
    inline_thinking_opened: bool = False
    """The prompt template opens the first of these tags, so an answer begins inside it."""
    unclosed_thinking: Literal["hold", "release"] = "hold"
    """What happens to inline thinking that is never closed. `hold`: it stays thinking, and nothing is visible before
    the first other block. `release`: it is buffered until it is closed, and becomes text if the turn ends normally
    without that.
    """
    models: dict[str, ThinkingTags] = {}
    """Overrides of the previous three fields by model name prefix; the longest match wins."""
    max_stop_strings: int | None = None
    """None: the API's own limit. Stop strings that are not sent are found in the text."""
    end_of_turn: str | None = None
    """Prefill mode: the token that ends a message; empty: none; None: the API's default (Gemini `<|eot|>`)."""
    models_continuing: tuple[str, ...] = (
        *("gemini-1", "gemini-2", "gemini-3-", "gemini-3.1-"),
        *("claude-2", "claude-3", "claude-instant", "claude-haiku-4-5", "claude-opus-4-0", "claude-opus-4-1"),
        *("claude-opus-4-2", "claude-opus-4-5", "claude-opus-4@", "claude-sonnet-4-0", "claude-sonnet-4-2"),
        *("claude-sonnet-4-5", "claude-sonnet-4@"),
    )
    """Anthropic and Gemini: name prefixes of models that continue their own last message (`on_failure` continue).
    Others reject it; other Gemini models get the prefill-mode text as a user message.
    """
    continues: Literal["", "completions", "message"] = ""
    """Chat Completions: how the vendor continues a text (prefill mode): with its completions endpoint, or by continuing
    a final assistant message; empty: not at all.
    """
    continuing: dict[str, bool] = {}
    """Chat Completions: request fields that ask to continue the last message (vLLM: `continue_final_message` true and
    `add_generation_prompt` false).
    """
    continued: dict[str, bool] = {}
    """Chat Completions: fields to set on that message itself (`prefix` for some)."""
    default_max_tokens: int = 8192
    """Anthropic: `max_tokens` is required; this is used if the request has none."""
    options: dict[str, object] = {}
    """Options of an API added by a package; the API defines them."""

    def of(self, model: str) -> Quirks:
        """Resolve the quirks for one model; `models` is applied and then empty."""
        if not self.models:
            return self
        found = max((name for name in self.models if begins_with(model, (name,))), key=len, default=None)
        tags = self.models[found] if found is not None else None
        fields = {name: getattr(tags, name) for name in tags.__struct_fields__} if tags else {}
        return msgspec.structs.replace(self, models={}, **fields)


# A provider accepts many spellings of a model: with a `models/` prefix, in another case, with surrounding spaces. Every
# decision by model name compares keys (`model_key`), so that no spelling bypasses it. Aliases that only the provider
# knows (`gemini-flash-latest`) are settings: `[providers.NAME.model_aliases]`.


_COLLECTION = re.compile(r"(?:projects/[^/]+/locations/[^/]+/)?(?:publishers/[^/]+/)?models/+")
_NO_TEXT = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories of invisible characters: controls, direction marks, zero-width characters, line ends."""


def model_key(name: str) -> str:
    """Normalize a name for comparison: strip spaces, case and the collection prefix."""
    key = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold()).strip()
    while found := _COLLECTION.match(key):
        key = key[found.end() :].strip()
    return key


def names_model(name: str, model: str) -> bool:
    """Whether a table entry matches this model: exactly, or as a prefix if it ends in `*` (`gpt-5*`)."""
    key = model_key(model)
    return key.startswith(model_key(name[:-1])) if name.endswith("*") else key == model_key(name)


def begins_with(model: str, beginnings: Iterable[str]) -> bool:
    """Whether the model's name begins with one of these prefixes."""
    return model_key(model).startswith(tuple(model_key(beginning) for beginning in beginnings))


def text_problem(name: str) -> str | None:
    """The problem of a name (blank, or invisible characters); None if it is valid."""
    if not name.strip():
        return "it is blank"
    if any(unicodedata.category(char) in _NO_TEXT for char in name):
        return "it has characters that cannot be seen"
    return None


def segment_problem(name: str) -> str | None:
    """What is wrong with a name as part of a URL path; None if nothing.

    Some servers decode a path before they route it, so even a quoted name could lead elsewhere.
    """
    if "%" in name or "\\" in name or any(part.strip() in ("", ".", "..") for part in name.split("/")):
        return "it cannot be part of a path"
    return text_problem(name)
