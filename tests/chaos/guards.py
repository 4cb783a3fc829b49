"""The policies of the chaos, and the text that subscribers must receive of a run with them. The verdicts depend on the
run alone, so a second evaluation gives the same verdicts.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import msgspec

from tests.chaos import rogue
from tests.chaos.record import Guarded, Piece
from tokenbus.events.public import PublicEvent
from tokenbus.policy.builtin.tool_call_gate import Block, Replace, ToolCallGate, Verdict
from tokenbus.policy.processor import NewToolCall, StreamContext, StreamProcessor
from tokenbus.policy.stream_state import StreamState, ToolCallStreamBlock

CHAINS: dict[str, tuple[str, ...]] = {
    "mask": ("mask",),
    "gate": ("gate",),
    "stop": ("mask", "stop"),
    "all": ("hold", "mask", "gate"),
    "gate and stop": ("gate", "stop"),
    "rogue": ("rogue",),
    "rogue in a chain": ("mask", "rogue", "gate"),
}
"""The values of a run's ``metadata.guard``, and the policies of each."""
MASKED, MASK = "wörd7", "wörd[7]"
"""A word, and its replacement. Both have the same first letters, so a text that is cut within the word is a prefix of
the expected text.
"""
STOP = "enough!"
"""The policy `stop` ends a run before this word is published."""
NOTICE, REASON, AGAIN = "[not that]", "not this one", " again"
TIMEOUT_S = 7.0
"""Timeout of each policy: longer than any worker is frozen."""
LONGEST_S = TIMEOUT_S * max(map(len, CHAINS.values()))
"""Total time that the policies of a run may take."""


class Gate(ToolCallGate):
    """Judges calls concurrently, each after a delay, like a policy that queries another service."""

    side_by_side = True

    async def judge(self, call: ToolCallStreamBlock, context: StreamContext[Any]) -> Verdict:
        arguments: dict[str, Any] = json.loads(call.arguments)
        await asyncio.sleep(arguments["wait_ms"] / 1000)
        match _verdict(arguments["what"]):
            case "block":
                return Block(REASON)
            case "tell":
                return Block(REASON, NOTICE)
            case "change":
                return Replace(NewToolCall(call.id, call.name, _changed(call.arguments)))
            case _:
                return None


class Hold(StreamProcessor):
    """Holds each text until it is complete, and then a moment longer. A text that is cut off is never published."""

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._held: list[PublicEvent] = []

    async def on_chunk(self, chunk: Any, state: StreamState, context: StreamContext[Any]) -> None:
        if state.chunk_block is None or state.chunk_block.kind != "text":
            await context.send(chunk)
            return
        self._held.append(chunk)
        if not (state.just_completed or state.just_cut):
            return
        held, self._held = self._held, []
        if state.just_completed:
            await asyncio.sleep(0.1)
            for each in held:
                await context.send(each)


class Stop(StreamProcessor):
    """Ends the run at a word."""

    async def on_chunk(self, chunk: Any, state: StreamState, context: StreamContext[Any]) -> None:
        if state.chunk_block and STOP in state.chunk_block.text:
            context.terminate("it was enough")
        else:
            await context.send(chunk)


def settings() -> str:
    """The tables of the policies, and the routes to them."""
    rule = f'{{ find = "{MASKED}", replace = "{MASK}" }}'
    uses = {name: f'use = "{__name__}:{name.title()}"' for name in ("gate", "hold", "stop")}
    uses["mask"] = (
        f'use = "tokenbus.policy:ReplaceText"\noptions = {{ rules = [{rule}], kinds = ["text", "thinking"] }}'
    )
    tables = [f"[policies.{name}]\ntimeout_s = {TIMEOUT_S}\n{use}\n" for name, use in uses.items()]
    tables.append(
        f'[policies.rogue]\nuse = "{rogue.__name__}:Rogue"\ntimeout_s = {rogue.TIMEOUT_S}\non_error = "pass"\n'
    )
    for guard, chain in CHAINS.items():
        tables.append(f'[[policy_routes]]\npolicies = {json.dumps(chain)}\nmetadata = {{ guard = "{guard}" }}\n')
    return "\n".join(tables)


def published_pieces(pieces: Sequence[Piece], guard: str) -> tuple[list[Piece], Guarded]:
    """Which of these pieces must be published if a run has this guard, and how the run must end."""
    chain = CHAINS[guard]
    blocked: list[Piece] = []
    left: list[Piece] = []
    withheld_text = [word for word, policy in ((MASKED, "mask"), (STOP, "stop")) if policy in chain]
    for piece in pieces:
        if piece.kind != "tool_call":
            text = piece.whole.replace(MASKED, MASK) if "mask" in chain else piece.whole
            left.append(msgspec.structs.replace(piece, whole=text))
            continue
        what: str = json.loads(piece.whole)["what"]
        verdict = _verdict(what) if "gate" in chain else "let"
        if verdict != "let":
            withheld_text.append(json.dumps(what))
        match verdict:
            case "let":
                left.append(piece)
            case "change":
                left.append(msgspec.structs.replace(piece, whole=_changed(piece.whole)))
            case _:
                blocked.append(piece)
                left += [Piece(piece.turn, "text", NOTICE)] if verdict == "tell" else []
    texts = {piece.whole for piece in pieces}
    guarded = Guarded(
        chain=chain,
        blocked=tuple(blocked),
        changed=tuple(piece for piece in left if piece.whole not in texts and piece.whole != NOTICE),
        reason=REASON,
        withheld_text=tuple(withheld_text),
        stopped="stop" in chain,
        may_fail=tuple(policy for policy in chain if policy == "rogue"),
    )
    return left, guarded


def _verdict(what: str) -> str:
    """The verdict on the call ``<run>/<turn>/<n>``."""
    _, turn, n = what.split("/")
    return ("let", "block", "tell", "change")[(int(turn) + int(n)) % 4]


def _changed(arguments: str) -> str:
    call: dict[str, Any] = json.loads(arguments)
    return msgspec.json.encode(call | {"what": call["what"] + AGAIN}).decode()
