"""Policies that replace words, patterns and secrets, even if a match spans chunks."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from tokenbus.events.public import BlockKind
from tokenbus.policy.builtin.stream_replace import CompiledRules, Rewriter, Rule
from tokenbus.policy.processor import StreamContext, StreamProcessor
from tokenbus.policy.stream_state import StreamBlock, StreamState
from tokenbus.secret_env import secret_in


class ReplaceTextOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to replace, and in which kinds of blocks."""

    rules: list[Rule]
    kinds: tuple[BlockKind, ...] = ("text",)


class ReplaceText(StreamProcessor):
    """Replaces what the rules match, in the content of blocks and in the data beside it.

    That data is citations, the prompts of images and their like. Only text that may begin a match is held back.
    """

    Options = ReplaceTextOptions

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._rules = CompiledRules(self.rules())
        self._texts: dict[int, _Text] = {}

    def rules(self) -> list[Rule]:
        """The rules to apply."""
        return self.options.rules

    async def on_chunk(self, chunk: Any, state: StreamState, context: StreamContext[Any]) -> None:
        if ended := state.just_completed or state.just_cut:
            await self._finish(ended, context)
        block, text = state.chunk_block, context.text(chunk)
        if not text and (block is None or block.kind in self.options.kinds):
            await context.send(context.with_data(chunk, self._rewritten))
            return
        if block is None or block.kind not in self.options.kinds:
            await context.send(chunk)
            return
        rewritten = self._texts.setdefault(block.number, _Text(Rewriter(self._rules)))
        rewritten.last = chunk
        ready = rewritten.rewriter.feed(text)
        rewritten.out.append(ready)
        await context.send(chunk if ready == text else context.with_text(chunk, ready))

    def _rewritten(self, text: str) -> str:
        rewriter = Rewriter(self._rules)
        return rewriter.feed(text) + rewriter.end()

    async def on_end(self, state: StreamState, context: StreamContext[Any]) -> None:
        for block in state.blocks:
            await self._finish(block, context)

    async def _finish(self, block: StreamBlock, context: StreamContext[Any]) -> None:
        """Flush the held text of a finished block, in the form of its last chunk."""
        if (text := self._texts.pop(block.number, None)) is None:
            return
        if rest := text.rewriter.end():
            text.out.append(rest)
            await context.send(context.with_text(text.last, rest))
        final = "".join(text.out)
        if final != block.text:
            context.decided("replace", block, final=final)


class _Text:
    """A block that is being rewritten."""

    def __init__(self, rewriter: Rewriter) -> None:
        self.rewriter = rewriter
        self.last: Any = None
        self.out: list[str] = []


class RedactSecretsOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options in addition to the well-known key formats."""

    kinds: tuple[BlockKind, ...] = ("text", "thinking", "tool_call", "tool_result", "audio", "server_tool", "image")
    mark: str = "[redacted]"
    env: list[str] = []
    """Environment variables whose values are secret, if they are set, or the files that they name with `_FILE`."""
    more: list[Rule] = []


SHORTEST = 8
"""Minimum length of a variable's value: a shorter one would match ordinary text."""

KNOWN = (
    Rule(find="sk-", then=r"[A-Za-z0-9_-]{20,250}"),
    Rule(find="ghp_", then="[A-Za-z0-9]{36,255}"),
    Rule(find="gho_", then="[A-Za-z0-9]{36,255}"),
    Rule(find="ghs_", then="[A-Za-z0-9]{36,255}"),
    Rule(find="ghu_", then="[A-Za-z0-9]{36,255}"),
    Rule(find="github_pat_", then="[A-Za-z0-9_]{22,255}"),
    Rule(find="glpat-", then="[A-Za-z0-9_-]{20,100}"),
    Rule(find="hf_", then="[A-Za-z0-9]{30,60}"),
    Rule(find="xox", then="[abeprs]-[A-Za-z0-9-]{10,250}"),
    Rule(find="AKIA", then="[A-Z0-9]{16}"),
    Rule(find="ASIA", then="[A-Z0-9]{16}"),
    Rule(find="AIza", then="[A-Za-z0-9_-]{35}"),
    Rule(find="eyJ", then=r"[A-Za-z0-9_-]{10,1000}\.[A-Za-z0-9_-]{10,4000}\.[A-Za-z0-9_-]{10,1000}"),
    Rule(find="-----BEGIN ", then=r"[A-Z ]{0,30}PRIVATE KEY-----[A-Za-z0-9+/=\s\\]{0,7000}"),
)
"""OpenAI and Anthropic, GitHub, GitLab, Hugging Face, Slack, AWS, Google; JSON web tokens; PEM private keys."""


class RedactSecrets(ReplaceText):
    """Replaces text that looks like an API key, a token or a private key, and the values of chosen variables."""

    Options = RedactSecretsOptions  # pyright: ignore[reportIncompatibleVariableOverride, reportAssignmentType]

    def rules(self) -> list[Rule]:
        options: RedactSecretsOptions = self.options
        values = (secret_in(name, os.environ) for name in options.env)
        named = [Rule(find=value) for value in values if len(value) >= SHORTEST]
        forms = [msgspec.structs.replace(rule, word_start=True) for rule in KNOWN]
        known = [msgspec.structs.replace(rule, replace=options.mark) for rule in (*named, *forms)]
        return [*known, *options.more]
