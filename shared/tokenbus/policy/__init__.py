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
from tokenbus.policy.link import Handling, Link
from tokenbus.policy.processor import Decision, NewText, NewToolCall, StreamContext, StreamProcessor

__all__ = [
    "Block",
    "ContentStreamBlock",
    "Decision",
    "Handling",
    "Link",
    "NewText",
    "NewToolCall",
    "OtherStreamBlock",
    "Replace",
    "StreamBlock",
    "StreamContext",
    "StreamProcessor",
    "StreamState",
    "ToolCallGate",
    "ToolCallStreamBlock",
    "Verdict",
    "apply_policies",
]
