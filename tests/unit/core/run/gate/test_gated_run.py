"""A run with policies: its drafts, its published events, and what waits for verdicts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.e2e import judge
from tests.unit.core.run.gated_scripts import JUDGED, HeldStory
from tests.unit.core.run.script import call, item, of_type, text
from tokenbus.client.response import Response
from tokenbus.core.run.effects import Draft, EndRun, ForgetRun, NextTurn, ReleaseFromPolicies, RunTools
from tokenbus.core.run.gate import MAX_WORKERS_WITHOUT_PROGRESS
from tokenbus.events import normalized as n
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import (
    HAS_ENDED,
    WHOLE_RUN,
    CancelRequested,
    DeadlinePassed,
    PolicyVerdict,
    PolicyVerdicts,
    RecordedDecision,
    ToolReported,
    ToolReturned,
)
from tokenbus.events.public import (
    BlockComplete,
    BlockStarted,
    Cancelled,
    Chunk,
    Completed,
    Incomplete,
    PublicEvent,
    Restarted,
    RunFailedEvent,
    Started,
    ToolProgress,
    UsageReported,
)
from tokenbus.events.requests import ThinkingPart
from tokenbus.events.usage import Usage

PASSING = msgspec.structs.replace(JUDGED, on_error="pass")


def visible_chunks(story: HeldStory) -> list[dict[str, Any]]:
    """The log as its reader sees it, judged by the rules of every log."""
    log: list[dict[str, Any]] = msgspec.to_builtins(story.published)
    judge.check(log)
    return log


def shown(story: HeldStory) -> str:
    return "".join(e.text for e in story.published if isinstance(e, Chunk))


def published_text(story: HeldStory) -> str:
    return judge.text(visible_chunks(story))


def end_of(story: HeldStory) -> Any:
    return story.published[-1]


def held_back(drafts: list[PublicEvent], *, block: int) -> list[PolicyVerdict]:
    """Rulings that let everything through but this block."""
    return [PolicyVerdict(d.seq, events=[] if getattr(d, "block", -1) == block else [d]) for d in drafts]


async def test_what_policies_changed_takes_nothing_back_to_its_provider() -> None:
    story = HeldStory()
    story.provider(
        *(n.Start("m", api="anthropic"), n.BlockStart(0, "text"), n.TextDelta(0, "Hi"), n.Opaque(0, "citations", "[]")),
        *(n.BlockStop(0), *item(1, "anthropic.item", "{}"), n.Opaque(0, "late", "x"), n.Done("stop")),
    )
    changed = [
        msgspec.structs.replace(d, text="Ho") if isinstance(d, Chunk) and d.kind == "text" else d for d in story.drafts
    ]
    story.rule(*(PolicyVerdict(d.seq, events=[d]) for d in changed))
    block, kept = of_type(story.published, BlockComplete)
    assert (block.content, block.opaque) == ("Ho", None)
    assert (kept.kind, kept.item, kept.content) == ("server_tool", "anthropic.item", "{}"), "it goes back as it came"
    assert end_of(story).provider_extra is None


async def test_data_that_came_after_its_block_goes_back_under_policies_that_leave_the_block_as_it_is() -> None:
    story = HeldStory()
    story.provider(n.Start("m", api="openai-chat"), *item(0, "x.withheld", "{}"), n.BlockStart(1, "thinking"))
    story.provider(n.ThinkingDelta(1, "Hm."), n.BlockStop(1), *text(2, "Yes."), n.Opaque(1, "reasoning_details", "[1]"))
    story.provider(n.Done("stop"))
    story.rule(*held_back(story.drafts, block=0))
    thinking, _ = of_type(story.published, BlockComplete)
    back = {"reasoning_details": "[1]", "api": "openai-chat"}
    assert end_of(story).provider_extra == [{"block": thinking.block, "opaque": back}]
    [message] = Response.of(story.published).messages
    assert message.content[0] == ThinkingPart(text="Hm.", opaque=back)


async def test_only_the_start_is_published_before_a_verdict() -> None:
    story = HeldStory()
    story.provider(n.Start("m"), *text(0, "Hello"), n.Done("stop"))
    assert [type(e) for e in story.published] == [Started]
    assert not story.run.over


async def test_passed_output_is_published_unchanged() -> None:
    story = HeldStory()
    story.provider(n.Start("m"), *text(0, "Hello ", "you"))
    story.pass_all()
    story.provider(*text(1, "!"), n.Done("stop", usage=Usage(input=1, output=2)))
    story.pass_all()
    assert published_text(story) == "Hello you!"
    assert end_of(story).finish == "stop"
    assert story.of(EndRun) == [EndRun("completed")]
    assert story.of(Draft)[-1].over


async def test_a_verdict_that_arrives_twice_counts_once() -> None:
    story = HeldStory()
    story.provider(n.Start("m"), *text(0, "Hello"))
    again = [PolicyVerdict(d.seq, events=[d]) for d in story.drafts]
    story.pass_all()
    assert story.rule(*again) == []
    assert story.rule(*again, worker="second") == []
    story.provider(n.Done("stop"))
    story.pass_all()
    assert published_text(story) == "Hello"


async def test_a_second_worker_continues_in_the_block_where_the_first_one_died() -> None:
    story = HeldStory()
    story.provider(n.Start("m"), n.BlockStart(0, "text"), n.TextDelta(0, "Hel"))
    story.pass_all()
    story.reborn()
    story.provider(n.TextDelta(0, "lo"), n.BlockStop(0), n.Done("stop"))
    # The second one has other numbers for the same blocks, as where its policies put a block before them.
    story.rule(*(PolicyVerdict(d.seq, events=[renumbered(d, 7)]) for d in story.drafts), worker="second")
    assert published_text(story) == "Hello"


async def test_deferred_output_is_published_once_and_the_end_waits_for_it() -> None:
    story = HeldStory()
    story.provider(n.Start("m"), *text(0, "first"), *text(1, "second"), n.Done("stop"))
    first = [d for d in story.drafts if getattr(d, "block", -1) == 0]
    for d in story.drafts:
        if d in first:
            story.rule(PolicyVerdict(d.seq, deferred=["1"] if isinstance(d, BlockComplete) else []))
        else:
            story.rule(PolicyVerdict(d.seq, events=[d]))
    story.ruled = len(story.drafts)
    assert not story.run.over
    late = PolicyVerdict(first[-1].seq, "1", events=first)
    story.rule(late)
    assert published_text(story) == "secondfirst"
    assert story.rule(late) == []


async def test_tools_run_once_their_whole_turn_is_judged() -> None:
    story = HeldStory()
    story.provider(n.Start("m"), *call(0, "c1", "weather", "{}"), n.Done("tool_use"))
    assert not story.of(RunTools)
    story.pass_all()
    (run,) = story.of(RunTools)
    assert [w.tool_id for w in run.work] == ["c1"]
    story.control(ToolReturned(run.work[0].block, "warm", is_error=False))
    story.pass_all()
    assert [w.work.turn for w in story.of(NextTurn)] == [1]
    story.provider(n.Start("m"), *text(0, "It is warm"), n.Done("stop"))
    story.pass_all()
    assert judge.blocks(visible_chunks(story)) == [("tool_call", "{}"), ("tool_result", "warm"), ("text", "It is warm")]


async def test_a_withheld_call_never_runs_and_only_the_model_gets_the_reason() -> None:
    story = HeldStory()
    story.provider(n.Start("m"), *call(0, "c1", "weather", "{}"), *call(1, "c2", "f", '{"x":1}'), n.Done("tool_use"))
    steps = held_back(story.drafts, block=0)
    blocked = RecordedDecision("guard", "block", "no weather here", tool_id="c1", tool_name="weather", original="{}")
    steps[-1] = msgspec.structs.replace(steps[-1], decisions=[blocked])
    story.ruled = len(story.drafts)
    story.rule(*steps)
    (run,) = story.of(RunTools)
    assert [w.tool_id for w in run.work] == ["c2"]
    story.control(ToolReturned(run.work[0].block, "done", is_error=False))
    story.pass_all()
    (next_turn,) = story.of(NextTurn)
    results = next_turn.history[-1].content
    assert [(r.tool_id, r.is_error) for r in results] == [("c1", True), ("c2", False)]
    assert "no weather here" in results[0].content
    assert [p.tool_id for p in next_turn.history[0].content] == ["c1", "c2"]
    story.provider(n.Done("stop"))
    story.pass_all()
    assert judge.blocks(visible_chunks(story)) == [("tool_call", '{"x":1}'), ("tool_result", "done")]
    assert story.decisions == ["block"]


async def test_a_tools_progress_is_published_under_the_number_of_its_call() -> None:
    story = HeldStory()
    story.provider(n.Start("m"), *call(0, "c1", "weather", "{}"), *call(1, "c2", "f", "{}"), n.Done("tool_use"))
    story.ruled = len(story.drafts)
    story.rule(*held_back(story.drafts, block=0))
    (run,) = story.of(RunTools)
    story.control(ToolReported(run.work[0].block, 0.5))
    story.pass_all()
    (progress,) = of_type(story.published, ToolProgress)
    (shown,) = of_type(story.published, BlockComplete)
    assert (progress.block, progress.tool_id) == (shown.block, "c2")


async def test_a_turn_whose_calls_were_all_withheld_continues_at_once() -> None:
    story = HeldStory()
    story.provider(n.Start("m"), *call(0, "c1", "weather", "{}"), n.Done("tool_use"))
    story.ruled = len(story.drafts)
    story.rule(*held_back(story.drafts, block=0))
    assert not story.of(RunTools)
    assert [e.work.turn for e in story.of(NextTurn)] == [1]


async def test_a_changed_call_runs_with_the_changed_arguments() -> None:
    story = HeldStory()
    story.provider(n.Start("m"), *call(0, "c1", "weather", '{"city":"', 'Rome"}'), n.Done("tool_use"))

    def changed(d: PublicEvent) -> PublicEvent:
        if isinstance(d, Chunk) and d.tool_call_part == "input":
            return msgspec.structs.replace(d, text='{"city":"Oslo"}')
        return d

    story.ruled = len(story.drafts)
    story.rule(*(PolicyVerdict(d.seq, events=[changed(d)]) for d in story.drafts))
    (run,) = story.of(RunTools)
    assert run.work[0].arguments == '{"city":"Oslo"}'
    (shown,) = of_type(story.published, BlockComplete)
    assert shown.input == {"city": "Oslo"}


async def test_a_run_that_ends_in_unpublished_calls_just_ends() -> None:
    story = HeldStory(max_tool_depth=0)
    story.provider(n.Start("m"), *call(0, "c1", "weather", "{}"), n.Done("tool_use"))
    story.rule(*held_back(story.drafts, block=0))
    assert end_of(story).finish == "stop"


async def test_a_policy_ends_the_run_and_what_is_open_is_cut() -> None:
    story = HeldStory()
    story.provider(n.Start("m"), n.BlockStart(0, "text"), n.TextDelta(0, "Hello"), n.TextDelta(0, " you"))
    *most, last = story.drafts
    steps = [PolicyVerdict(d.seq, events=[d]) for d in most]
    story.rule(*steps, PolicyVerdict(last.seq, ends="enough"))
    end = end_of(story)
    assert isinstance(end, Incomplete)
    assert (end.finish, end.error and end.error.code) == ("content_filter", "policy_terminated")
    assert "enough" in end.reason
    assert story.of(EndRun) == [EndRun("incomplete")]
    assert story.provider(n.TextDelta(0, "more")) == []
    visible_chunks(story)


async def test_after_a_cancel_no_waiting_output_is_published() -> None:
    story = HeldStory()
    story.provider(n.Start("m"), n.BlockStart(0, "text"), n.TextDelta(0, "Hello"))
    story.pass_all()
    story.provider(n.TextDelta(0, " secret"))
    story.control(CancelRequested("enough"))
    assert published_text(story) == "Hello"
    assert isinstance(end_of(story), Cancelled)
    assert story.pass_all() == []


async def test_a_cancel_while_the_end_waits_to_be_judged_ends_the_run_cancelled() -> None:
    story = HeldStory()
    story.provider(n.Start("m"), *text(0, "Hello"), n.Done("stop", usage=Usage(input=1, output=5)))
    story.control(CancelRequested())
    assert published_text(story) == ""
    assert isinstance(end_of(story), Cancelled)
    assert end_of(story).usage.output == 5


async def test_a_cancel_during_a_tool_gives_results_to_the_published_calls() -> None:
    story = HeldStory()
    story.provider(n.Start("m"), *call(0, "c1", "f", "{}"), *call(1, "c2", "g", "{}"), n.Done("tool_use"))
    story.ruled = len(story.drafts)
    story.rule(*held_back(story.drafts, block=0))
    story.control(CancelRequested())
    assert judge.blocks(visible_chunks(story)) == [("tool_call", "{}"), ("tool_result", "cancelled")]


async def test_the_run_ends_at_its_deadline_if_no_policy_worker_answers() -> None:
    story = HeldStory()
    story.provider(n.Start("m"), *text(0, "Hello"))
    story.control(DeadlinePassed("policy", 0))
    assert published_text(story) == ""
    end = end_of(story)
    assert isinstance(end, RunFailedEvent)
    assert end.error.code == "policy_silent"
    assert story.decisions == ["error"]


async def test_a_run_that_has_ended_before_is_over_and_its_policies_learn_it() -> None:
    story = HeldStory()
    story.provider(n.Start("m"), *text(0, "Hello"))
    before = len(story.published)
    story.control(DeadlinePassed("silent", HAS_ENDED), CancelRequested())
    assert story.run.over
    assert len(story.published) == before
    assert story.of(ForgetRun) == [ForgetRun()]
    assert story.of(Draft)[-1] == Draft([], over=True)


@pytest.mark.parametrize("judged", range(5))
async def test_a_run_continues_without_its_policy_worker_if_allowed(judged: int) -> None:
    story = HeldStory(PASSING)
    story.provider(n.Start("m"), n.BlockStart(0, "text"), n.TextDelta(0, "Hel"))
    story.provider(n.TextDelta(0, "lo "), n.BlockStop(0))
    story.rule(*(PolicyVerdict(d.seq, events=[d]) for d in story.drafts[:judged]))
    story.reborn()
    story.control(DeadlinePassed("policy", story.run.state.gate.signs_of_life if story.run.state.gate else -1))
    story.provider(*text(1, "you"), n.Done("stop"))
    assert published_text(story) == "Hello you"
    assert isinstance(end_of(story), Completed)


async def test_a_late_answer_counts() -> None:
    story = HeldStory()
    story.provider(n.Start("m"), *text(0, "Hello"))
    story.pass_all()
    story.control(DeadlinePassed("policy", 0))
    story.provider(n.Done("stop"))
    story.pass_all()
    assert published_text(story) == "Hello"
    assert isinstance(end_of(story), Completed)


async def test_a_run_that_waits_for_a_policy_slot_is_not_without_a_worker() -> None:
    story = HeldStory()
    story.provider(n.Start("m"), *text(0, "Hello"))
    story.control(PolicyVerdicts("first", [], 0), DeadlinePassed("policy", 0))
    story.provider(n.Done("stop"))
    story.pass_all()
    assert published_text(story) == "Hello"
    assert isinstance(end_of(story), Completed)


async def test_a_worker_that_repeats_released_output_counts_as_alive() -> None:
    story = HeldStory()
    story.provider(n.Start("m"), *text(0, "Hello"))
    story.rule(PolicyVerdict(0, events=[story.drafts[0]]))
    assert story.run.state.gate
    since_ms = story.run.state.gate.since_ms
    story.rule(PolicyVerdict(0, events=[story.drafts[0]]), worker="second")
    assert story.run.state.gate.since_ms > since_ms


async def test_workers_without_progress_do_not_extend_the_deadline() -> None:
    story = HeldStory()
    story.provider(n.Start("m"), *text(0, "Hello"))
    story.rule(PolicyVerdict(0, events=[story.drafts[0]]))
    for number in range(MAX_WORKERS_WITHOUT_PROGRESS):
        story.rule(PolicyVerdict(0, events=[story.drafts[0]]), worker=f"other {number}")
    story.reborn()
    assert story.run.state.gate
    alive = story.run.state.gate.signs_of_life
    story.control(PolicyVerdicts("one more", [], 0))
    story.rule(PolicyVerdict(0, events=[story.drafts[0]]), worker="one more")
    assert story.run.state.gate.signs_of_life == alive
    story.rule(PolicyVerdict(1, events=[story.drafts[1]]), worker="one more")
    story.control(PolicyVerdicts("another", [], 0))
    assert story.run.state.gate.signs_of_life > alive + 1


async def test_steps_after_a_lost_message_of_their_worker_are_no_verdicts() -> None:
    story = HeldStory()
    story.provider(n.Start("m"), n.BlockStart(0, "text"), n.TextDelta(0, "Hel"))
    repeated = [PolicyVerdict(d.seq, events=[d]) for d in story.drafts]
    story.rule(*repeated, first=0)
    story.provider(n.TextDelta(0, "lo"), n.BlockStop(0))
    rest = [PolicyVerdict(d.seq, events=[d]) for d in story.drafts[len(repeated) :]]
    assert rest
    assert story.run.state.gate
    since_ms = story.run.state.gate.since_ms
    story.reborn()
    # The message with the second worker's repeated steps was lost with a server, and with it the number of its block.
    assert not story.rule(*rest, worker="second", first=len(repeated))
    assert story.run.state.gate.since_ms == since_ms, "not a sign of life either: the policies may time out"
    story.reborn()
    story.rule(*repeated, *rest, worker="third", first=0)
    assert shown(story) == "Hello"


async def test_a_message_that_arrives_twice_is_no_gap() -> None:
    story = HeldStory()
    story.provider(n.Start("m"), *text(0, "Hello"))
    steps = [PolicyVerdict(d.seq, events=[d]) for d in story.drafts]
    story.rule(*steps[:2], first=0)
    story.rule(*steps[:2], first=0)
    story.rule(steps[2], first=2)
    story.rule(*steps[:2], first=0)  # a command that stood in a broken connection's buffer
    story.rule(*steps[3:], first=3)
    assert shown(story) == "Hello"
    assert len(steps) > 3


async def test_a_run_whose_verdicts_were_lost_says_so_when_its_policies_time_out() -> None:
    story = HeldStory()
    story.provider(n.Start("m"), *text(0, "Hello"))
    story.rule(*(PolicyVerdict(d.seq, events=[d]) for d in story.drafts), first=1)
    assert story.run.state.gate
    story.control(DeadlinePassed("policy", story.run.state.gate.signs_of_life))
    assert end_of(story).error.code == "policy_silent"
    assert "lost verdicts" in end_of(story).error.message


async def test_a_policy_that_stopped_being_called_ends_the_run_at_any_point() -> None:
    story = HeldStory()
    story.provider(n.Start("m"), n.BlockStart(0, "text"), n.TextDelta(0, "Hello"))
    story.pass_all()
    story.provider(n.TextDelta(0, " secret"))
    story.rule(
        PolicyVerdict(
            WHOLE_RUN, decisions=[RecordedDecision("guard", "error", "it blocked")], ends="guard: failed: it blocked"
        )
    )
    assert published_text(story) == "Hello"
    end = end_of(story)
    assert isinstance(end, Incomplete)
    assert (end.error and end.error.code, end.finish) == ("policy_terminated", "content_filter")
    assert story.decisions == ["error"]


@pytest.mark.parametrize("may_pass", [True, False])
async def test_a_run_that_is_held_back_before_its_first_draft_waits_no_longer_than_others(may_pass: bool) -> None:
    story = HeldStory(PASSING if may_pass else JUDGED)
    story.pass_all()
    story.control(DeadlinePassed("policy", story.run.state.gate.signs_of_life if story.run.state.gate else -1))
    story.provider(n.Start("m"), *text(0, "Hello"), n.Done("stop"))
    assert len(story.of(ReleaseFromPolicies)) == may_pass
    assert published_text(story) == ("Hello" if may_pass else "")
    assert isinstance(end_of(story), Completed if may_pass else RunFailedEvent)


async def test_a_retry_voids_published_blocks_under_their_published_numbers() -> None:
    story = HeldStory(on_failure="restart")
    story.provider(n.Start("m"), *text(0, "Hid"), n.BlockStart(1, "text"), n.TextDelta(1, "Hello"))
    story.ruled = len(story.drafts)
    # In the numbering of its policies the published text is block 0.
    steps = held_back(story.drafts, block=0)
    story.rule(*(msgspec.structs.replace(s, events=[renumbered(e, -1) for e in s.events]) for s in steps))
    story.provider(n.Failed(ErrorInfo(code="overloaded", kind="overloaded", message="busy", retryable=True)))
    assert [e.work.attempt for e in story.of(NextTurn)] == [2]
    fresh = story.drafts[story.ruled :]
    story.ruled = len(story.drafts)
    story.rule(*(PolicyVerdict(d.seq, events=[renumbered(d, -1)]) for d in fresh))
    (restarted,) = of_type(story.published, Restarted)
    assert restarted.drop_from == 0
    story.provider(n.Start("m"), *text(0, "Again"), n.Done("stop"))
    story.pass_all()
    assert judge.blocks(visible_chunks(story)) == [("text", "Again")]


def renumbered(event: Any, by: int) -> Any:
    if isinstance(event, Restarted):
        return msgspec.structs.replace(event, drop_from=max(0, event.drop_from + by))
    return msgspec.structs.replace(event, block=event.block + by) if hasattr(event, "block") else event


async def test_a_replay_restores_the_same_state() -> None:
    def play() -> HeldStory:
        story = HeldStory()
        story.provider(n.Start("m"), *text(0, "Hello"), *call(1, "c1", "f", "{}"), n.Done("tool_use"))
        story.pass_all()
        return story

    one, two = play(), play()
    two.reborn()
    assert msgspec.msgpack.encode(one.run.state) == msgspec.msgpack.encode(two.run.state)
    for story in (one, two):
        story.control(ToolReturned(1, "ok", is_error=False))
        story.pass_all()
        story.provider(n.Done("stop"))
        story.pass_all()
    assert one.published == two.published
    assert one.effects == two.effects


async def test_usage_is_sent_in_its_place() -> None:
    story = HeldStory()
    story.provider(n.Start("m"), *text(0, "Hello"), n.Done("stop", usage=Usage(input=1, output=2)))
    story.pass_all()
    assert [type(e) for e in story.published][-2:] == [UsageReported, Completed]


async def test_a_broken_ruling_harms_no_listener() -> None:
    story = HeldStory()
    story.provider(n.Start("m"), *text(0, "Hello"))
    start, piece, stop = story.drafts[2:5]
    assert isinstance(start, BlockStarted)
    story.rule(
        PolicyVerdict(0),
        PolicyVerdict(1),
        PolicyVerdict(2, events=[piece, start, stop]),
        PolicyVerdict(2, events=[piece, stop]),
        PolicyVerdict(9),
    )
    story.control(CancelRequested())
    assert published_text(story) == ""


async def test_a_withheld_call_gets_no_published_result_if_its_turn_fails() -> None:
    story = HeldStory(on_failure="fail")
    late = ErrorInfo(code="deadline", kind="timeout", message="the run's deadline has passed")
    story.provider(n.Start("m"), *call(0, "c1", "weather", "{}"), *call(1, "c2", "f", '{"x":1}'), n.Cut("cut", late))
    story.ruled = len(story.drafts)
    story.rule(*held_back(story.drafts, block=0))
    story.pass_all()
    assert judge.blocks(visible_chunks(story)) == [("tool_call", '{"x":1}'), ("tool_result", late.message)]


async def test_a_result_that_is_cut_says_of_which_call_it_is() -> None:
    story = HeldStory()
    story.provider(n.Start("m"), *call(0, "c1", "weather", "{}"), n.Done("tool_use"))
    story.pass_all()
    (run,) = story.of(RunTools)
    story.control(ToolReturned(run.work[0].block, "warm", is_error=False))
    start = next(d for d in story.drafts if isinstance(d, BlockStarted) and d.kind == "tool_result")
    story.rule(PolicyVerdict(start.seq, events=[start]))
    story.control(CancelRequested())
    (cut,) = [e for e in of_type(story.published, BlockComplete) if e.kind == "tool_result"]
    assert (cut.cut, cut.tool_id, cut.tool_name) == (True, "c1", "weather")
