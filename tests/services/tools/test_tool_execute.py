"""The outcome of a call for any arguments and any behaviour of the tool."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tokenbus.bus.liveness import Liveness
from tokenbus.events.requests import TextFormat
from tokenbus_services.settings import LimitSettings, PythonTool, Settings
from tokenbus_services.tools.executor import ToolExecutor, ToolOutcome, ToolRegistry

from . import sample_tools
from .conftest import SAMPLES, MakeExecutor, MemoryBlobs, call, until

CITY: dict[str, object] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "maximum": 7}},
    "required": ["city"],
}


@pytest.fixture(autouse=True)
def fresh_samples() -> Iterator[None]:
    sample_tools.events.clear()
    sample_tools.release.clear()
    sample_tools.gathered = 0
    yield
    sample_tools.release.set()


async def test_a_result_is_the_text_that_the_tool_returned(run: MakeExecutor) -> None:
    assert await run("greet").execute(call("greet", '{"name": "Ada"}')) == ToolOutcome("Hello, Ada")
    assert await run("greet_later").execute(call("greet_later", '{"name": "Ada"}')) == ToolOutcome("Later, Ada")


async def test_empty_arguments_are_an_empty_object(run: MakeExecutor) -> None:
    assert await run("echo").execute(call("echo", "")) == ToolOutcome("{}")


async def test_a_tool_with_a_format_gets_the_text_and_a_call_of_the_other_kind_is_an_error(run: MakeExecutor) -> None:
    made, text = run("echo", format=TextFormat()), '{"not": json'
    assert await made.execute(call("echo", text, free_text=True)) == ToolOutcome('{"input":"{\\"not\\": json"}')
    problems = {
        "takes free text": (made, call("echo")),
        "takes a JSON object": (run("echo"), call("echo", free_text=True)),
    }
    for problem, (executor, wrong) in problems.items():
        outcome = await executor.execute(wrong)
        assert outcome.is_error
        assert problem in outcome.content


async def test_a_process_of_its_own_gets_the_text_too() -> None:
    tool = PythonTool(call=f"{SAMPLES}:echo", format=TextFormat())
    made = ToolExecutor.from_settings(Settings(tools={"echo": tool}))
    made._results._blobs = MemoryBlobs()
    await made.open(Liveness())
    try:
        assert await made.execute(call("echo", "a\nb", free_text=True)) == ToolOutcome('{"input":"a\\nb"}')
    finally:
        await made.close()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ('{"city": }', "not valid JSON: invalid character (byte 9)"),
        ('{"city": "Oslo"', "not valid JSON: they are truncated (byte 15)"),
        ("   ", "not valid JSON"),
        ('{"city": "Oslo"} and more', "not valid JSON: trailing characters (byte 18)"),
        ('{"city": NaN}', "not valid JSON"),
        ('"Oslo"', "must be one JSON object"),
        ('["Oslo"]', "must be one JSON object"),
        ("null", "must be one JSON object"),
        ('{"a":' * 5000 + "1" + "}" * 5000, "nested too deep"),
        ('{"city": "\ud800"}', "not valid JSON"),
        ("{}", "arguments: "),
        ('{"city": 7, "days": 9}', "arguments.city: "),
        ('{"city": 7, "days": 9}', "arguments.days: "),
    ],
)
async def test_bad_arguments_are_an_error_that_says_where(run: MakeExecutor, arguments: str, problem: str) -> None:
    outcome = await run("echo", parameters=CITY).execute(call("echo", arguments))
    assert outcome.is_error
    assert problem in outcome.content
    assert len(outcome.content) < 5000


async def test_arguments_that_the_callable_does_not_take_are_an_error(run: MakeExecutor) -> None:
    executor = run("greet")
    missing = await executor.execute(call("greet", "{}"))
    extra = await executor.execute(call("greet", '{"name": "Ada", "mood": "glad"}'))
    assert missing == ToolOutcome("the arguments do not fit: missing a required argument: 'name'", is_error=True)
    assert extra == ToolOutcome("the arguments do not fit: got an unexpected keyword argument 'mood'", is_error=True)


async def test_an_unknown_tool_is_an_error(run: MakeExecutor) -> None:
    outcome = await run("echo").execute(call("x" * 10_000))
    assert outcome.is_error
    assert outcome.content.startswith("unknown tool 'xxx")
    assert len(outcome.content) < 200


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("fail", "ValueError: no luck"),
        ("fail_later", "LookupError: not there"),
        ("fail_politely", "the shop is closed on Sundays"),
        ("leave", "SystemExit: 3"),
        ("leave_later", "SystemExit: 3"),
        ("interrupt", "KeyboardInterrupt: "),
        ("exotic_later", "Exotic: rare"),
        ("stop_iteration", "RuntimeError: coroutine raised StopIteration"),
        ("cancel_itself", "the tool cancelled itself"),
        ("time_out_itself", "TimeoutError: the far end"),
    ],
)
async def test_what_a_tool_raises_is_an_error_without_a_traceback(run: MakeExecutor, name: str, content: str) -> None:
    assert await run(name).execute(call(name)) == ToolOutcome(content, is_error=True)


async def test_an_error_is_bounded_and_holds_no_secret(run: MakeExecutor) -> None:
    executor = run("fail", env={"ANTHROPIC_API_KEY": "sk-ant-123456", "HOME": "/home/ada"})
    message = "key sk-ant-123456 in /home/ada " + "x" * 100_000
    outcome = await executor.execute(call("fail", json.dumps({"message": message})))
    assert outcome.content.startswith("ValueError: key [redacted] in /home/ada xxx")
    assert len(outcome.content) <= 4000


async def test_a_tool_gets_its_call_context_if_it_has_the_parameter(run: MakeExecutor) -> None:
    outcome = await run("context_aware").execute(call("context_aware", '{"city": "Oslo"}'))
    assert json.loads(outcome.content) == ["r1", 2, "call_1", "r1/2/3", True, "Oslo"]


async def test_a_model_cannot_pass_for_the_context(run: MakeExecutor) -> None:
    outcome = await run("context_aware").execute(call("context_aware", '{"context": {"run": "other"}}'))
    assert json.loads(outcome.content)[0] == "r1"


async def test_a_tool_may_have_an_argument_named_context(run: MakeExecutor) -> None:
    executor = run("own_context", parameters={"properties": {"context": {"type": "string"}}})
    assert (await executor.execute(call("own_context", '{"context": "birds"}'))).content == "about birds"


@pytest.mark.parametrize(("ours", "theirs"), [(0.05, None), (None, 0.05), (0.05, 100.0), (100.0, 0.05)])
async def test_the_shorter_timeout_counts(run: MakeExecutor, ours: float | None, theirs: float | None) -> None:
    outcome = await run("stall", timeout_s=ours).execute(call("stall", timeout_s=theirs))
    assert outcome == ToolOutcome("the tool returned no result within 0.05 s", is_error=True)
    assert sample_tools.events == ["stalling", "cancelled"]


async def test_a_thread_that_does_not_end_in_time_is_an_error(run: MakeExecutor) -> None:
    outcome = await run("hang", timeout_s=0.05).execute(call("hang"))
    assert outcome == ToolOutcome("the tool returned no result within 0.05 s", is_error=True)


async def test_a_coroutine_that_swallows_its_cancel_is_left_behind(
    run: MakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenbus_services.tools.executor._GRACE_S", 0.05)
    executor = run("ignore_cancel", timeout_s=0.05)
    outcome = await executor.execute(call("ignore_cancel"))
    assert outcome == ToolOutcome("the tool returned no result within 0.05 s", is_error=True)
    assert len(executor._left) == 1
    sample_tools.release.set()
    await until(lambda: not executor._left)
    assert sample_tools.events == ["ignoring", "swallowed"]


@pytest.mark.parametrize(("name", "begun"), [("stall", "stalling"), ("hang", "hanging")])
async def test_a_cancelled_call_stops_its_tool_and_stays_cancelled(run: MakeExecutor, name: str, begun: str) -> None:
    task = asyncio.create_task(run(name).execute(call(name)))
    await until(lambda: begun in sample_tools.events)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ("cancelled" in sample_tools.events) == (name == "stall")


@pytest.mark.parametrize("name", ["meet", "meet_later"])
async def test_calls_run_side_by_side(run: MakeExecutor, name: str) -> None:
    executor = run(name, timeout_s=60)
    outcomes = await asyncio.gather(*(executor.execute(call(name, block=i)) for i in range(4)))
    assert outcomes == [ToolOutcome("met")] * 4


async def test_a_fault_of_our_own_is_an_error_of_the_call_alone(
    run: MakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = run("give")
    monkeypatch.setattr(executor._results, "text", None)
    outcome = await executor.execute(call("give", '{"size": 3}'))
    assert outcome == ToolOutcome("the call failed: TypeError", is_error=True)


async def test_closing_closes_the_executors_resources(run: MakeExecutor, blobs: MemoryBlobs) -> None:
    executor = run("echo")
    await executor.open()
    await executor.close()
    assert blobs.closed


async def test_an_executor_comes_from_settings() -> None:
    executor = ToolExecutor.from_settings(Settings(tools={"t": PythonTool(call=f"{SAMPLES}:nothing")}), env={})
    await executor.open()
    assert await executor.execute(call("t")) == ToolOutcome("")
    await executor.close()


NAMES = ("echo", "greet", "greet_later", "context_aware", "own_context", "give_json", "nobody")

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
argument_texts = st.one_of(
    st.text(),
    st.text(alphabet='{}[]":,\\ 0123456789aenu\n', max_size=40),
    st.dictionaries(st.sampled_from(["name", "city", "context", "self", "call", "size", ""]), json_values).map(
        json.dumps
    ),
    st.characters(categories=["Cs"]).map(lambda c: f'{{"city": "{c}"}}'),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(NAMES), arguments=argument_texts)
@example(name="echo", arguments="[" * 100_000)
@example(name="echo", arguments='{"city": ' + "9" * 5000 + "}")
@example(name="greet", arguments='{"name": "\\ud800"}')
def test_no_arguments_whatsoever_make_a_call_raise(name: str, arguments: str) -> None:
    async def execute() -> ToolOutcome:
        tools = {known: PythonTool(call=f"{SAMPLES}:{known}") for known in NAMES if known != "nobody"}
        registry = ToolRegistry(tools, env={})
        executor = ToolExecutor(registry, LimitSettings(tool_result_bytes=100), MemoryBlobs())
        try:
            return await executor.execute(call(name, arguments))
        finally:
            await executor.close()

    outcome = asyncio.run(execute())
    outcome.content.encode()  # it can travel
    assert outcome.is_error or name != "nobody"
