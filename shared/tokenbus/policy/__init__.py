"""Policies: what may hold, change or stop a stream while it runs. See docs/guides/policies.md.

`blocks` is what a policy sees, `processor` what it is and does, `dialect` what a kind of stream must be able to say,
`public_events` and `openai_chunks` the two kinds there are, `stream` a stream under its policies. No service, no wire.
"""

from tokenbus.policy.apply import apply_policies
from tokenbus.policy.blocks import (
    ContentStreamBlock,
    OtherStreamBlock,
    StreamBlock,
    StreamState,
    ToolCallStreamBlock,
)
from tokenbus.policy.call_gate import Block, Replace, ToolCallGate, Verdict
from tokenbus.policy.dialect import Dialect
from tokenbus.policy.judge import CallJudge, CallJudgeOptions
from tokenbus.policy.link import Handling, Link
from tokenbus.policy.openai_chunks import OpenAIChunks
from tokenbus.policy.processor import Decision, NewText, NewToolCall, StreamContext, StreamProcessor
from tokenbus.policy.public_events import PublicEvents
from tokenbus.policy.rewrite import RedactSecrets, RedactSecretsOptions, ReplaceText, ReplaceTextOptions
from tokenbus.policy.rewriting import Rule
from tokenbus.policy.stream import PolicyStream
from tokenbus.policy.tool_rules import ToolRules, ToolRulesOptions

__all__ = [
    "Block",
    "CallJudge",
    "CallJudgeOptions",
    "ContentStreamBlock",
    "Decision",
    "Dialect",
    "Handling",
    "Link",
    "NewText",
    "NewToolCall",
    "OpenAIChunks",
    "OtherStreamBlock",
    "PolicyStream",
    "PublicEvents",
    "RedactSecrets",
    "RedactSecretsOptions",
    "Replace",
    "ReplaceText",
    "ReplaceTextOptions",
    "Rule",
    "StreamBlock",
    "StreamContext",
    "StreamProcessor",
    "StreamState",
    "ToolCallGate",
    "ToolCallStreamBlock",
    "ToolRules",
    "ToolRulesOptions",
    "Verdict",
    "apply_policies",
]
