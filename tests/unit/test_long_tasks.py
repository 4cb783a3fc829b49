"""Lists every task that is started outside a worker's `Liveness`, with what bounds it.

An unwatched long-lived task may end or stall while its worker keeps claiming and renewing. So a new task is
either started by `Liveness.start` (then `tests/e2e/faults/test_stuck_workers.py` has its name), or entered here with a
reason.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
STARTS = {"create_task", "ensure_future", "Thread"}
NO_WORKERS = (
    "cli/chat/",
    "cli/demo.py",
    "cli/up/",
    "mock_provider/",
    "testing/",
    "tokenbus/sync/",
    "tokenbus/integrations/",
)
"""They do not run in a worker: commands of a person, stand-ins for tests, and what runs in a user's program."""

LIVENESS = "it is the watched one"
CALLER = "its caller waits for it, with a bound, or ends with it"
STEP = "one step, which ends; the next look starts another"
READER = "of one reader, which waits for it"
GROUP = "a task group's, which ends with its first failure"
ITEM = "of one item in hand, which is stopped without progress (runtime/queue_work.py)"
REQUEST = "of one HTTP request or socket, and ends with it"
WATCH = "it is the watch itself; what watches that is the loop's watch, or the done callback"

UNWATCHED = {
    "tokenbus/bus/liveness.py:Liveness.start": LIVENESS,
    "tokenbus/bus/liveness.py:Liveness.start_passing": LIVENESS,
    "tokenbus/bus/liveness.py:beating": CALLER,
    "tokenbus/bus/liveness.py:together": CALLER,
    "tokenbus/bus/server/clock.py:ServerClock.now_ms": STEP,
    "tokenbus/bus/server/clients.py:ClusterClient._reload_slots": STEP,
    "tokenbus/bus/server/retry.py:_Watch.__init__": "of one try, which waits for its end",
    "tokenbus/bus/server/stream_reader.py:StreamReader._read_separately": READER,
    "tokenbus/client/display_pace.py:coalesced": READER,
    "tokenbus/client/sessions/reader.py:SessionReader._news": READER,
    "tokenbus/client/tailing.py:Hub._close": STEP,
    "tokenbus/client/tailing.py:Tail._interrupt": STEP,
    "tokenbus/client/publishing.py:PublishQueue.put": "ends with the queue; every caller waits for it",
    "tokenbus/client/subscriptions/ack_tracker.py:_Lanes.put": GROUP,
    "tokenbus/client/subscriptions/sentences.py:SentenceSubscription._advance": READER,
    "tokenbus/policy/apply.py:_under": READER,
    "tokenbus/policy/policy_runner.py:_Work.__init__": "of one call of a policy, which has a timeout",
    "tokenbus_services/blobs/archive_http.py:ArchiveRoutes._log": REQUEST,
    "tokenbus_services/blobs/http.py:BlobRoutes._get": REQUEST,
    "tokenbus_services/cli/worker.py:serve": "the worker ends with the first of them",
    "tokenbus_services/cli/worker.py:_Server.leave": "the worker stops, and waits for nothing else",
    "tokenbus_services/cli/worker.py:_Server.shutdown": "waits for a second signal while the worker stops",
    "tokenbus_services/cli/worker.py:Lifespan.start": "the worker ends with it",
    "tokenbus_services/fetcher/calls/background_job.py:LeftJobs._start": "a few looks and calls, each with a bound",
    "tokenbus_services/fetcher/calls/steered_call.py:SteeredCall.steer": ITEM,
    "tokenbus_services/endpoints/limiter.py:Limiter._later": STEP,
    "tokenbus_services/fetcher/request_media.py:TurnMedia._find": ITEM,
    "tokenbus_services/fetcher/uploads/upload.py:Flight.start": "each attempt that waits for it has a bound",
    "tokenbus_services/fetcher/uploads/plan.py:Uploads._uploaded": ITEM,
    "tokenbus_services/gateway/answers/asgi.py:EventStream.__call__": REQUEST,
    "tokenbus_services/gateway/answers/reader.py:RunReader.__aenter__": REQUEST,
    "tokenbus_services/gateway/forward/call.py:ForwardedAnswer.__call__": REQUEST,
    "tokenbus_services/gateway/forward/call.py:unless_gone": REQUEST,
    "tokenbus_services/gateway/forward/forward.py:Forwarder.settle_later": "some commands and tries, each with a bound",
    "tokenbus_services/gateway/routes/sockets/chat_socket.py:ChatSocket._serve": REQUEST,
    "tokenbus_services/gateway/routes/sockets/chat_socket.py:ChatSocket._read": REQUEST,
    "tokenbus_services/gateway/routes/sockets/response_socket.py:ResponseSocket.serve": REQUEST,
    "tokenbus_services/gateway/routes/sockets/response_socket.py:ResponseSocket._read": REQUEST,
    "tokenbus_services/gateway/routes/native.py:_live_lines": REQUEST,
    "tokenbus_services/gateway/runs.py:GatewayRuns.later": STEP,
    "tokenbus_services/webhooks/receiver.py:Receiver._start": "of one try, which has a timeout",
    "tokenbus_services/executor/processes.py:Executors._fork": "it connects a socket pair, which needs nobody else",
    "tokenbus_services/net/connection.py:_first": CALLER,
    "tokenbus_services/policy_stage/calls.py:PolicyExecutor.handle": "without its mark the executor is killed",
    "tokenbus_services/policy_stage/calls.py:_RunInExecutor.__init__": "of one run, in a marked executor",
    "tokenbus_services/policy_stage/calls.py:_RunInExecutor._until_known": CALLER,
    "tokenbus_services/policy_stage/executors.py:PolicyPool._place": CALLER,
    "tokenbus_services/policy_stage/run_task.py:PolicyRunTask.start": "of one run, which the parser's clock ends",
    "tokenbus_services/policy_stage/run_task.py:PolicyRunTask._work": GROUP,
    "tokenbus_services/process/parent_guard.py:main": "a thread that ends the process with its parent",
    "tokenbus_services/runtime/queue_work.py:InFlight.start": ITEM,
    "tokenbus_services/runtime/queue_work.py:InFlight._check_all": "it gives up an item without progress, with a bound",
    "tokenbus_services/runtime/queue_work.py:InFlight._ended": "it finishes one item; each of its commands has a bound",
    "tokenbus_services/runtime/supervision.py:WorkerSupervisor.open": WATCH,
    "tokenbus_services/runtime/supervision.py:WorkerSupervisor.wait_or_fail.receive_or_failed": WATCH,
    "tokenbus_services/runtime/task_failures.py:LoggedTasks._start": "of some commands, each of which has a bound",
    "tokenbus_services/telemetry/tracer.py:RunTracer.close": "waited for with a bound, at the end",
    "tokenbus_services/tools/executor.py:ToolExecutor._within": ITEM,
    "tokenbus_services/tools/mcp/server.py:McpServer._connected": CALLER,
    "tokenbus_services/tools/mcp/server.py:McpServer._connection": "notices alone; lists are read again anyway",
    "tokenbus_services/tools/python/executors.py:ToolProcess.on_message": "awaits `Holding.ask`",
    "tokenbus_services/tools/questions.py:Holding.ask": "the call that asks waits for it, and cancels it at its end",
    "tokenbus_services/tools/progress.py:Reporter._wake": ITEM,
    "tokenbus_services/tools/python/calls.py:prepare.serve": "of one call, whose worker kills the executor",
    "tokenbus_services/tools/python/function.py:_in_thread": CALLER,
}
STARTED_IN_ONE = {
    "tokenbus_services/cli/worker.py:serve": 4,
    "tokenbus_services/cli/worker.py:Lifespan.start": 2,
    "tokenbus_services/gateway/answers/asgi.py:EventStream.__call__": 2,
    "tokenbus_services/gateway/answers/reader.py:RunReader.__aenter__": 2,
    "tokenbus_services/gateway/forward/call.py:ForwardedAnswer.__call__": 2,
    "tokenbus_services/gateway/forward/call.py:unless_gone": 2,
    "tokenbus_services/runtime/supervision.py:WorkerSupervisor.wait_or_fail.receive_or_failed": 2,
}
"""How many starts a scope has, if more than one: its reason above is about each of them."""


def started_in(source: str) -> Iterator[str]:
    """The scope of each task or thread that this module starts by itself."""

    def walk(node: ast.AST, scope: tuple[str, ...]) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            if isinstance(child, ast.Call):
                name = child.func.attr if isinstance(child.func, ast.Attribute) else getattr(child.func, "id", "")
                if name in STARTS:
                    yield ".".join(scope)
            yield from walk(child, (*scope, child.name) if named else scope)

    yield from walk(ast.parse(source), ())


def test_every_task_is_watched_or_has_a_reason_why_not() -> None:
    found: Counter[str] = Counter()
    for top in ("shared", "services"):
        for file in sorted((ROOT / top).rglob("*.py")):
            name = file.relative_to(ROOT / top).as_posix()
            source = file.read_text()
            if any(part in name for part in NO_WORKERS) or not any(start in source for start in STARTS):
                continue
            found.update(f"{name}:{scope}" for scope in started_in(source))
    assert found == {scope: STARTED_IN_ONE.get(scope, 1) for scope in UNWATCHED}


def test_a_task_is_found_in_every_place_that_can_start_one() -> None:
    source = "class A:\n async def b(self):\n  def c(): self.t = loop().create_task(x())\n  Thread(target=c)"
    assert [*started_in(source)] == ["A.b.c", "A.b"]
    twice = "def a():\n create_task(x())\n create_task(y())"
    assert Counter(started_in(twice)) == {"a": 2}
