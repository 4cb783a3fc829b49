"""Policies: hold, change or stop a stream while it runs. See docs/guides/policies.md.

- `stream_state`: what a policy sees; `processor`: the policy interface.
- `stream_format`: what a stream format must provide; `public` and `openai`: the two formats.
- `policy_chain`: a stream under a chain of policies.

No service and no network IO.
"""

from tokenbus.policy.apply import apply_policies
from tokenbus.policy.builtin.model_judge import CallJudge, CallJudgeOptions
from tokenbus.policy.builtin.rewrite import RedactSecrets, RedactSecretsOptions, ReplaceText, ReplaceTextOptions
from tokenbus.policy.builtin.stream_replace import Rule
from tokenbus.policy.builtin.tool_call_gate import Block, Replace, ToolCallGate, ToolRules, ToolRulesOptions, Verdict
from tokenbus.policy.openai import OpenAIChunks
from tokenbus.policy.policy_runner import BoundPolicy, Handling, PolicyStream
from tokenbus.policy.processor import Decision, NewText, NewToolCall, StreamContext, StreamProcessor
from tokenbus.policy.public import PublicEvents
from tokenbus.policy.stream_format import StreamFormat
from tokenbus.policy.stream_state import (
    ContentStreamBlock,
    OtherStreamBlock,
    ServerToolStreamBlock,
    StreamBlock,
    StreamState,
    ToolCallStreamBlock,
)

__all__ = [
    "Block",
    "BoundPolicy",
    "CallJudge",
    "CallJudgeOptions",
    "ContentStreamBlock",
    "Decision",
    "Handling",
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
    "ServerToolStreamBlock",
    "StreamBlock",
    "StreamContext",
    "StreamFormat",
    "StreamProcessor",
    "StreamState",
    "ToolCallGate",
    "ToolCallStreamBlock",
    "ToolRules",
    "ToolRulesOptions",
    "Verdict",
    "apply_policies",
]
