"""What an AG-UI client has of a run: its blocks as messages, for `MESSAGES_SNAPSHOT`. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import msgspec

from tokenbus.events.public import BlockComplete, BlockKind

Json = dict[str, object]
METADATA = "tokenbus"


class SentBlock(msgspec.Struct, kw_only=True):
    """A block that the client knows."""

    block: int
    turn: int
    kind: BlockKind
    id: str
    """Of its message; of a call, the call's id."""
    name: str = ""
    """tool_call: the tool's."""
    call: str = ""
    """tool_result: the call's id."""
    text: list[str]
    open: bool = True
    encrypted: str | None = None
    failed: bool = False
    """tool_result: the tool returned an error."""

    @property
    def content(self) -> str:
        """All of it so far."""
        return "".join(self.text)


def encrypted(complete: BlockComplete | None, items: Iterable[Json] = ()) -> str | None:
    """What the provider wants back with a block, as the text of `encryptedValue`; None if there is nothing.

    ``items``: the provider's own, which come before the block. No message of this protocol has them that clients
    send back.
    """
    values: Json = {"items": list(items)}
    if complete:
        values |= {"signature": complete.signature, "opaque": complete.opaque, "opaque_blobs": complete.opaque_blobs}
    kept = {name: value for name, value in values.items() if value}
    return msgspec.json.encode(kept).decode() if kept else None


def parent_of(run: str, turn: int, blocks: Iterable[SentBlock]) -> str:
    """The id of the assistant's message that has the calls of a turn: its first text, or one of their own."""
    for sent in blocks:
        if sent.turn == turn and sent.kind == "text":
            return sent.id
    return f"{run}:turn:{turn}"


def messages_of(run: str, blocks: list[SentBlock], void: list[SentBlock]) -> list[Json]:
    """The messages of the blocks, open ones without content: it follows as events.

    A client keeps the reasoning messages that a snapshot without any leaves out, so a void one is emptied.
    """
    messages: list[Json] = []
    by_id: dict[str, Json] = {}
    for sent in blocks:
        content = "" if sent.open else sent.content
        match sent.kind:
            case "text":
                message: Json = {"id": sent.id, "role": "assistant", "content": content}
            case "thinking":
                message = {"id": sent.id, "role": "reasoning", "content": content}
            case "tool_result":
                message = {"id": sent.id, "role": "tool", "toolCallId": sent.call, "content": content}
                if sent.failed:
                    message["error"] = content
            case "tool_call":
                call: Json = {"id": sent.id, "type": "function", "function": {"name": sent.name, "arguments": content}}
                if sent.encrypted:
                    call["encryptedValue"] = sent.encrypted
                parent = parent_of(run, sent.turn, blocks)
                if parent not in by_id:
                    by_id[parent] = {"id": parent, "role": "assistant"}
                    messages.append(by_id[parent])
                by_id[parent]["toolCalls"] = [*cast("list[Json]", by_id[parent].get("toolCalls", [])), call]
                continue
            case _:
                continue
        if sent.encrypted:
            message["encryptedValue"] = sent.encrypted
        if sent.id in by_id:  # its calls came first
            by_id[sent.id].update(message)
        else:
            by_id[sent.id] = message
            messages.append(message)
    if not any(message["role"] == "reasoning" for message in messages):
        empty: Json = {"role": "reasoning", "content": "", "metadata": {METADATA: {"void": True}}}
        messages += [{"id": sent.id, **empty} for sent in void if sent.kind == "thinking"]
    return messages
