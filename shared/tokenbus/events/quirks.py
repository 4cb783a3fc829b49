"""Which API a provider speaks, and how it differs from it: data that travels with an attempt."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tokenbus.events.model_names import begins_with

ApiName = str
"""One of `BUILT_IN`, or the name under which a package adds its own (`tokenbus.providers.plugins`)."""
BUILT_IN = ("anthropic", "openai-chat", "openai-responses", "openai-images", "gemini")


TagName = Annotated[str, Meta(pattern=r"^[A-Za-z][A-Za-z0-9_:.-]{0,63}$(?!\n)")]


class ThinkingTags(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How some models write their thinking into the text; see the fields of `Quirks` of the same meaning."""

    inline_thinking: tuple[TagName, ...] = ()
    inline_thinking_opened: bool = False
    unclosed_thinking: Literal["hold", "release"] = "hold"


class Quirks(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a vendor differs from the API it speaks: data from `[providers.NAME.quirks]`, never code."""

    reasoning_fields: tuple[str, ...] = ("reasoning_content", "reasoning", "reasoning_details")
    """Chat Completions: where reasoning text stands; the first present wins."""
    max_tokens_field: str = "max_completion_tokens"
    """Chat Completions: the name of the output limit."""
    stream_usage: bool = True
    """Chat Completions: ask for usage in the stream (`stream_options.include_usage`)."""
    system_role: str = "system"
    """Chat Completions: the role of system text (`developer` for some)."""
    reasoning_back: str = ""
    """Chat Completions: the field in which a message's thinking goes back (`reasoning_content` where a vendor wants it
    beside its tool calls); empty: it does not, but for `reasoning_details`. Responses: `reasoning_text` where a vendor
    wants reasoning in plain words back; empty: only what is encrypted."""
    cache_marks: bool = False
    """Chat Completions: send cache marks as `cache_control` (OpenRouter); others refuse the field. Responses: send them
    as `prompt_cache_breakpoint` (models from GPT-5.6 on)."""
    models_without_reasoning: tuple[str, ...] = ("gpt-3.5", "gpt-4", "chatgpt-")
    """Responses: how the names of models begin that do not reason, and refuse to be asked for encrypted reasoning."""
    models_with_budgets: tuple[str, ...] = (
        *("gemini-2", "claude-3-7", "claude-haiku-4-5", "claude-opus-4-0", "claude-opus-4-1", "claude-opus-4-2"),
        *("claude-opus-4-5", "claude-opus-4@", "claude-sonnet-4-0", "claude-sonnet-4-2", "claude-sonnet-4-5"),
        "claude-sonnet-4@",
    )
    """Anthropic and Gemini: how the names of models begin that take a thinking budget in tokens and no effort."""
    models_without_signatures: tuple[str, ...] = ("gemini-1", "gemini-2")
    """Gemini: how the names of models begin that take a call without a signature; others get one that says so."""
    effort_field: str = "reasoning_effort"
    """Chat Completions: where the effort goes (`reasoning.effort`: into an object); empty: nowhere."""
    budget_field: str = ""
    """Chat Completions: where the thinking budget goes, in the same way."""
    thinking_on: dict[str, object] = {}
    """Chat Completions: what the body of a request holds besides that asks for thinking."""
    thinking_off: dict[str, object] = {}
    """Chat Completions: what the body of a request holds that wants none; empty: the effort `none`."""
    inline_thinking: tuple[TagName, ...] = ()
    """Names of the tags in which a model writes its thinking into the text (`think`)."""
    inline_thinking_opened: bool = False
    """The prompt's template opens the first of these tags, so that an answer begins inside of it."""
    unclosed_thinking: Literal["hold", "release"] = "hold"
    """What becomes of such thinking where its close never comes. `hold`: it stays thinking, and nothing is heard before
    the first block that is none. `release`: it waits for its close, and is text where the turn ends soundly without."""
    models: dict[str, ThinkingTags] = {}
    """The three fields before this for models whose names begin so; of several beginnings the longest counts."""
    max_stop_strings: int | None = None
    """None: the API's own limit. Those that the provider is not told of are found in its text."""
    end_of_turn: str | None = None
    """Prefill mode: the token that ends a message; empty: none; None: as the API has it (Gemini `<|eot|>`)."""
    models_continuing: tuple[str, ...] = (
        *("gemini-1", "gemini-2", "gemini-3-", "gemini-3.1-"),
        *("claude-2", "claude-3", "claude-instant", "claude-haiku-4-5", "claude-opus-4-0", "claude-opus-4-1"),
        *("claude-opus-4-2", "claude-opus-4-5", "claude-opus-4@", "claude-sonnet-4-0", "claude-sonnet-4-2"),
        *("claude-sonnet-4-5", "claude-sonnet-4@"),
    )
    """Anthropic and Gemini: how the names of models begin that go on with a last message of their own (`on_failure`
    continue). Others refuse one; Gemini's get the text of prefill mode as the user's."""
    continues: Literal["", "completions", "message"] = ""
    """Chat Completions: how the vendor continues a text (prefill mode): by its completions endpoint, or by going on
    with a last message of the assistant; empty: it does not."""
    continuing: dict[str, bool] = {}
    """Chat Completions: fields of a request whose last message is to be continued (vLLM: `continue_final_message` true
    and `add_generation_prompt` false)."""
    continued: dict[str, bool] = {}
    """Chat Completions: fields of that message itself (`prefix` for some)."""
    default_max_tokens: int = 8192
    """Anthropic: `max_tokens` is required; this is used where the request has none."""
    options: dict[str, object] = {}
    """For the API of a package of its own: whatever that declares."""

    def of(self, model: str) -> Quirks:
        """The same as they are for one model: `models` is worked in, and empty."""
        if not self.models:
            return self
        found = max((name for name in self.models if begins_with(model, (name,))), key=len, default=None)
        tags = self.models[found] if found is not None else None
        fields = {name: getattr(tags, name) for name in tags.__struct_fields__} if tags else {}
        return msgspec.structs.replace(self, models={}, **fields)
