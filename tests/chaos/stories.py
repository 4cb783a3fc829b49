"""The runs of the chaos: what each requests, what the provider answers, and the expected output.

Everything about a run follows from the seed and its number.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec

from tests.chaos import crowd, hostile, rogue, talks, trees
from tests.chaos.guards import CHAINS, STOP, published_pieces
from tests.chaos.record import Fate, Piece, Story
from tests.e2e.fleet import BASE_PATHS
from tokenbus_services.mock_provider import (
    TOOL_RESULT,
    CutOff,
    Delivery,
    ErrorEvent,
    HangUp,
    ModelRequest,
    Random,
    Reply,
    Script,
    Stall,
    Status,
    ToolCall,
    Turn,
    Whole,
)
from tokenbus_services.mock_provider.script import Fault

LOOK: dict[str, Any] = {
    "name": "look",
    "parameters": {
        "type": "object",
        "properties": {"what": {"type": "string"}, "wait_ms": {"type": "integer"}},
        "required": ["what", "wait_ms"],
    },
}
CONTINUING = "continuing"
"""A Chat Completions provider that continues a final assistant message: for prefill and for `continue`."""
DEADLINE_S = 2.0
_FAULT_S = 7.0
"""Cost of a planned fault: the time until it is noticed, and the repeated turn."""
_MOST_WAIT_S = 1.2
_WRITTEN_S = 5.0
"""Seconds for the calls that a model writes into its text; they are not calls in the reply."""
_CHAT = (*BASE_PATHS, CONTINUING)
_PREFILL = ("anthropic", CONTINUING)
_FATES: dict[Fate, int] = {"plain": 55, "fails before text": 17, "cut in text": 8, "cancelled": 12, "deadline": 8}
_POLICIES = {"restart": 45, "before_first_visible": 30, "continue": 17, "fail": 8}
_ERROR_STATUS = {"openai-chat": 500, "openai-responses": 500, "gemini": 503, "gemini-interactions": 503}
_THOUGHT, _SAID = "ponder", "midway"
"""Words that mark a position in the thinking and in the text."""


class Scene(msgspec.Struct, frozen=True):
    """A run: its story for the judge, its request for the bus, its script for the provider."""

    story: Story
    request: dict[str, Any]
    script: Script | None
    """None: the provider is hostile."""
    cancel_after_s: float | None
    longest_s: float
    """Maximum duration if nothing disturbs it."""


class Stage:
    """All scenes so far; the provider finds its scripts here."""

    def __init__(
        self, seed: str, prefix: str, guarded: float = 0.0, hostile: float = 0.0, harmful: float = 0.0
    ) -> None:
        """Shares of the runs.

        ``guarded``: any policies. ``hostile``: a hostile provider. ``harmful``: a policy that harms its process.
        """
        self._harmful = harmful
        self._hostile = hostile
        self.seed = seed
        self._prefix = prefix
        self._guarded = guarded
        self.scenes: dict[str, Scene] = {}

    def next(self) -> Scene:
        """One more run."""
        number = len(self.scenes)
        guards = random.Random(
            f"{self.seed}:{number}:guard"
        )  # a random source of its own: the run is the same with policies and without
        guard = guards.choice([*CHAINS]) if guards.random() < self._guarded else None
        if guards.random() < self._harmful:
            guard = guards.choice([name for name, chain in CHAINS.items() if "rogue" in chain])
        harm = random.Random(f"{self.seed}:{number}:hostile")
        if harm.random() < self._hostile:
            run = f"{self._prefix}-run{number}"
            self.scenes[run] = Scene(*hostile.scene(run, harm), None, None, hostile.LONGEST_S)
            return self.scenes[run]
        scene = _scene(f"{self._prefix}-run{number}", random.Random(f"{self.seed}:{number}"), guard)
        self.scenes[scene.story.run] = scene
        return scene

    def huge(self, number: int) -> Scene:
        """A run whose request is too large. It counts once `add` gets it."""
        return Scene(*hostile.huge_scene(f"{self._prefix}-huge{number}"), None, None, hostile.HUGE_LONGEST_S)

    def add(self, scene: Scene) -> None:
        """A run that is not one of `next`."""
        self.scenes[scene.story.run] = scene

    def script_for(self, request: ModelRequest) -> Script | None:
        """The provider's answer: the last word of a request is its run."""
        if request.token.startswith(crowd.TOKEN):
            return crowd.SCRIPT
        if request.token.startswith(talks.TOKEN):
            return talks.SCRIPT
        if request.token.startswith(trees.TOKEN):
            return trees.script_for(request)
        scene = self.scenes.get(request.token)
        return scene.script if scene else None


def _scene(run: str, chance: random.Random, guard: str | None) -> Scene:
    fate = chance.choices(list(_FATES), list(_FATES.values()))[0]
    prefill = chance.random() < 0.2
    provider = chance.choice(_PREFILL if prefill else _CHAT)
    stream = prefill or chance.random() < 0.85
    policy = chance.choices(list(_POLICIES), list(_POLICIES.values()))[0]
    if (fate, policy) == ("deadline", "continue"):
        policy = "restart"  # the rest of a continued answer need not contain the place where the provider stalls
    # A model that continues from its text thinks again, so its thinking would depend on the faults.
    thinks = not prefill and (policy, provider) != ("continue", CONTINUING)
    whole_words = fate in ("cut in text", "deadline")
    at_last = f" {STOP} Or not." if guard and "stop" in CHAINS[guard] else ""
    replies, pieces = _conversation(
        run, chance, prefill=prefill, thinks=thinks, whole_words=whole_words, at_last=at_last
    )
    pieces, guarded = published_pieces(pieces, guard) if guard else (pieces, None)
    faulty = chance.randrange(len(replies))
    turns = tuple(
        Turn(
            says=reply,
            delivery=_delivery(chance),
            first=(_fault(fate, chance, provider, in_thinking=stream and thinks),)
            if n == faulty and fate != "deadline"
            else (),
            fault=Stall(after_text=_SAID) if n == faulty and fate == "deadline" else None,
        )
        for n, reply in enumerate(replies)
    )
    story = Story(
        run=run,
        provider=provider,
        mode="prefill" if prefill else "chat",
        stream=stream,
        on_failure=policy,
        fate=fate,
        pieces=tuple(pieces),
        guarded=guarded,
    )
    request: dict[str, Any] = {
        "type": "generate",
        "id": run,
        "provider": provider,
        "model": "chaos",
        "messages": [{"role": "user", "content": f"Please look at {run}"}],
        "tools": [LOOK],
        "stream": stream,
        "on_failure": policy,
    }
    if prefill:
        request |= {"mode": "prefill", "participant": "Claude"}
    if guard:
        request["metadata"] = {"guard": guard}
    if fate == "deadline":
        request["deadline_s"] = DEADLINE_S
    cancel = chance.uniform(0, 4) if fate == "cancelled" else None
    waits = _MOST_WAIT_S * sum(len(reply.tool_calls) for reply in replies)
    longest_s = sum(map(_longest_s, turns)) + (waits or _WRITTEN_S if prefill else waits)
    longest_s += rogue.LONGEST_S * (guarded is not None and bool(guarded.may_fail))
    return Scene(story, request, Script(name=run, turns=turns), cancel, longest_s + _FAULT_S * (fate != "plain"))


def _longest_s(turn: Turn) -> float:
    assert isinstance(turn.says, Reply)
    assert turn.delivery.pace
    size = len(turn.says.text) + len(turn.says.thinking or "")
    reads = size / (turn.says.chunk_size or 4) + 10 * (1 + len(turn.says.tool_calls))
    return turn.delivery.delay_s + reads / turn.delivery.pace


def _conversation(
    run: str, chance: random.Random, *, prefill: bool, thinks: bool, whole_words: bool, at_last: str
) -> tuple[list[Reply], list[Piece]]:
    """One to three turns, all but the last with calls, and their blocks. ``at_last``: the text at the end.

    ``whole_words``: no word is split over two events, because a word marks the place of a fault.
    """
    replies: list[Reply] = []
    pieces: list[Piece] = []
    last = chance.choices([0, 1, 2], [2, 5, 3])[0]
    for turn in range(last + 1):
        thinking = f"I {_THOUGHT} on {run}: {_words(chance)}" if thinks else ""
        seen = f" It says {TOOL_RESULT} and" if turn else ""
        # In prefill mode the text is a line of a conversation, and continues after the results of its calls.
        text = f"{chr(10) if prefill and turn else ' ' if prefill else ''}Turn {turn} {_SAID} of {run}.{seen}"
        text += f" {_words(chance)}{at_last if turn == last else ''}"
        calls = [
            {"what": f"{run}/{turn}/{n}", "wait_ms": chance.choice((0, 50, 400, 1200))}
            for n in range(chance.randint(1, 3) if turn < last else 0)
        ]
        pieces += [Piece(turn, "thinking", thinking)] if thinking else []
        if prefill and calls:
            text += "\n"
        # The blank after the model's name belongs to the line, not to the text.
        pieces += [Piece(turn, "text", text.removeprefix(" "))]
        pieces += [Piece(turn, "tool_call", msgspec.json.encode(call).decode()) for call in calls]
        if prefill:
            replies.append(
                Reply(text=text + _written(calls), chunk_size=None if whole_words else chance.choice((None, 3, 11)))
            )
        else:
            replies.append(
                Reply(thinking=thinking, text=text, tool_calls=tuple(ToolCall(name="look", arguments=c) for c in calls))
            )
    return replies, pieces


def _written(calls: list[dict[str, Any]]) -> str:
    """The calls as a model writes them in prefill mode."""
    if not calls:
        return ""
    inner = "".join(
        '<invoke name="look">\n'
        + "".join(f'<parameter name="{name}">{value}</parameter>\n' for name, value in call.items())
        + "</invoke>\n"
        for call in calls
    )
    return f"<function_calls>\n{inner}</function_calls>"


def _words(chance: random.Random) -> str:
    return " ".join(f"wörd{n}" for n in range(chance.randint(5, 40)))


def _delivery(chance: random.Random) -> Delivery:
    cuts = Whole() if chance.random() < 0.6 else Random(seed=chance.randrange(10**6), largest=400)
    return Delivery(cuts=cuts, pace=chance.choice((20, 60, 200)), delay_s=chance.choice((0, 0, 0.3)))


def _fault(fate: Fate, chance: random.Random, provider: str, *, in_thinking: bool) -> Fault | None:
    """The fault of the first attempt."""
    if fate == "cut in text":
        return CutOff(after_text=_SAID, reset=chance.random() < 0.5)
    if fate != "fails before text":
        return None
    faults: list[Fault] = [
        Status(status=429, headers={"retry-after": "0.2"}),
        Status(status=500),
        HangUp(),
        CutOff(reset=True),
    ]
    if in_thinking:
        status = _ERROR_STATUS.get(provider, 529)
        faults += [
            CutOff(after_text=_THOUGHT),
            Stall(after_text=_THOUGHT),
            ErrorEvent(status=status, after_text=_THOUGHT),
        ]
    return chance.choice(faults)
