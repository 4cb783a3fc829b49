"""Calls policies: the runs of one executor, each under its policies. `python -m …` is the policies' fork server.

To its worker, an executor is messages in, messages out (`messages`), whether it is a separate process or part of the
worker. It holds no state that another one could not rebuild: a run starts again there with its first draft.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar

import msgspec
import structlog

from tokenbus.bus import process_clock
from tokenbus.bus.keys import Keys
from tokenbus.bus.liveness import stop_task
from tokenbus.bus.scripts.runs.accept import mark_asked
from tokenbus.bus.server.retry import retry_until_available
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus.client import publishing
from tokenbus.client.client import Client, Run
from tokenbus.client.publishing import new_run_id
from tokenbus.errors import RequestInvalid
from tokenbus.events.frames import PolicyVerdict, RecordedDecision, drafts_decoder
from tokenbus.events.public import TERMINAL, PublicEvent
from tokenbus.events.requests import Generate
from tokenbus.policy.loading import PolicySpec, load
from tokenbus.policy.policy_runner import BoundPolicy, PolicyStream
from tokenbus.policy.processor import Decision
from tokenbus.policy.public import PublicEvents
from tokenbus_services.executor import fork_server
from tokenbus_services.executor.marks import MarkedCall, Marking, current_call, place_of
from tokenbus_services.policy_stage import messages
from tokenbus_services.policy_stage.messages import PolicyWork, ToExecutor
from tokenbus_services.policy_stage.provenance import Provenance, TracedEvents

log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)

OVERRUN_S = 2.0
"""How long a cancelled call may take to end after its timeout."""
CHECK_S = 0.5
CLOSE_S = 3.0
"""How long an executor may take to end running work."""

Links = Mapping[str, Callable[[], BoundPolicy]]
Send = Callable[[messages.FromExecutor], None]

_draft: ContextVar[int] = ContextVar("draft", default=0)
"""The draft with which a run's policies are called; for deferred work, the draft under which it was deferred."""


class PolicyStopped(Exception):
    """Raised instead of calling a policy that is no longer called."""


def load_policies(policies: Mapping[str, PolicySpec]) -> Links:
    """Import the policies. Raises SettingsError if one cannot be loaded or its options are invalid."""
    return {name: load(spec, f"policies.{name}") for name, spec in policies.items()}


class _RunningCall(msgspec.Struct, eq=False):
    task: int
    policy: str
    place: int
    until: float
    """The time at which it should have ended or be cancelled."""
    late_s: float = 0.0
    """How long it continued after that, counting only time in which the event loop ran and could have ended it."""


class PolicyExecutor:
    """Runs policies on the runs it is given. `handle` its messages; `close` it at the end."""

    def __init__(
        self,
        links: Links,
        work: PolicyWork,
        *,
        send: Send,
        marking: Marking | None = None,
        out_of_memory: Callable[[], None] = lambda: None,
    ) -> None:
        """``out_of_memory``: called inside a call that was refused memory."""
        self._links = links
        self._policies = {name: n for n, name in enumerate(links)}
        self._client = PolicyClient(work.redis_url, Keys(work.prefix, work.partitions), run_ttl_ms=work.run_ttl_ms)
        self._timeouts = {name: policy.timeout_s for name, policy in work.policies.items()}
        self._slots = FairSemaphore(work.calls, report_waiting_s=work.report_waiting_s)
        self.send = send
        self._marking = marking
        self._out_of_memory = out_of_memory
        self._runs: dict[int, _RunInExecutor] = {}
        self._closing: set[asyncio.Task[None]] = set()
        """Runs that were closed and have not ended. The event loop alone does not keep a task from being freed, and a
        policy may take its time.
        """
        self._running_calls: set[_RunningCall] = set()
        self._watching: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """Number of calls waiting for a slot."""
        return self._slots.waiting

    def handle(self, message: ToExecutor) -> None:
        match message:
            case messages.Open():
                self._runs[message.task] = _RunInExecutor(self, message)
            case messages.Feed():
                if run := self._runs.get(message.task):
                    run.add([draft for frame in message.frames for draft in drafts_decoder.decode(frame).events])
            case messages.Close():
                if run := self._runs.pop(message.task, None):
                    run.close()
                    self._closing.add(run.task)
                    run.task.add_done_callback(self._closing.discard)
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Cancel all running work, and with it the requests of policies on the bus."""
        tasks = [*self._closing, *(run.task for run in self._runs.values())]
        for run in self._runs.values():
            run.close()
        self._runs.clear()
        if self._watching:
            self._watching.cancel()
            tasks.append(self._watching)
        if tasks:
            await asyncio.wait(tasks)
        await self._client.aclose()

    def stream(self, opened: messages.Open, trace: Provenance) -> PolicyStream[PublicEvent]:
        """Create the run's policy stream, with new policy instances."""
        return PolicyStream(
            [self._links[name]() for name in opened.policies],
            TracedEvents(PublicEvents(lambda: 0), trace),
            run=opened.run,
            client=self._client,
            slot=lambda policy: self._slot(opened, policy),
        )

    @asynccontextmanager
    async def _slot(self, opened: messages.Open, policy: str) -> AsyncGenerator[None]:
        """Entered around each policy call and each deferred work item, in the task that runs it."""
        run = self._runs.get(opened.task)
        deferred = run is None or asyncio.current_task() is not run.task
        place = place_of(_draft.get(), deferred=deferred)
        failing = opened.failing.get(policy)
        if failing and place >= failing.since:
            raise PolicyStopped(failing.reason)
        async with self._slots.slot(opened.run, lambda: self.send(messages.WaitingForSlot(opened.task))):
            call = MarkedCall(opened.task, self._policies[policy], place)
            until = process_clock.now() + self._timeouts[policy]
            underway = _RunningCall(opened.task, policy, place, until)
            self._running_calls.add(underway)
            token = current_call.set(call)
            if self._marking:
                self._marking.page.waiting(self.waiting)
                self._marking.begin(call)
            try:
                yield
            except MemoryError:
                self._out_of_memory()
                raise
            finally:
                if self._marking:
                    self._marking.end(call)
                current_call.reset(token)
                self._running_calls.discard(underway)

    def ended(self, run: _RunInExecutor) -> None:
        if self._runs.get(run.opened.task) is run:
            del self._runs[run.opened.task]

    async def _watch(self) -> None:
        """Report calls that ignore their cancellation, and show that the event loop turns."""
        before = process_clock.now()
        while True:
            await asyncio.sleep(CHECK_S)
            now = process_clock.now()
            # Cap the step: if this process had no CPU, or another call blocked it, no call could end.
            passed_s, before = min(now - before, 2 * CHECK_S), now
            if self._marking:
                self._marking.page.beat()
                self._marking.page.waiting(self.waiting)
            for each in [each for each in self._running_calls if each.until < now]:
                each.late_s += passed_s
                if each.late_s > OVERRUN_S:
                    self._running_calls.discard(each)
                    self.send(messages.Overran(each.task, each.policy, each.place))


class _RunInExecutor:
    """One run: takes drafts in order, and sends verdicts as soon as they are known."""

    def __init__(self, executor: PolicyExecutor, opened: messages.Open) -> None:
        self.opened = opened
        self._executor = executor
        self._drafts: deque[PublicEvent] = deque()
        self._more = asyncio.Event()
        self._seen = 0
        self.task = asyncio.create_task(self._work(), name=f"policies of {opened.run}")

    def add(self, drafts: Sequence[PublicEvent]) -> None:
        self._drafts.extend(drafts)
        self._more.set()

    def close(self) -> None:
        """Stop: the run needs no more verdicts."""
        self.task.cancel()

    async def _work(self) -> None:
        task, send = self.opened.task, self._executor.send
        try:
            await self._judge()
            send(messages.Finished(task))
        except Exception as e:
            # Not caused by a policy: its errors are handled in the stream. The parser's policy timeout ends the run.
            log.exception("policy_run_failed", run=self.opened.run)
            send(messages.Defect(task, f"{type(e).__name__}: {e}"))
        finally:
            self._executor.ended(self)

    async def _judge(self) -> None:
        trace = Provenance()
        stream = self._executor.stream(self.opened, trace)
        try:
            while True:
                if stream.pending and not self._drafts:
                    await self._until_known(stream.pending)
                    self._send_verdicts(trace, await stream.collect(), stream)
                if not self._drafts:
                    if not stream.pending:
                        self._more.clear()
                        await self._more.wait()
                    continue
                draft = self._drafts.popleft()
                self._seen += 1
                _draft.set(draft.seq)
                trace.draft(draft)
                out = await stream.feed(draft)
                if isinstance(draft, TERMINAL):
                    out += await stream.end()
                self._send_verdicts(trace, out, stream)
                if isinstance(draft, TERMINAL) or stream.terminated:
                    return
        finally:
            await stream.close()

    async def _until_known(self, pending: Sequence[asyncio.Future[object]]) -> None:
        """Wait until deferred work is done or more drafts arrive."""
        self._more.clear()
        more = asyncio.create_task(self._more.wait())
        try:
            await asyncio.wait({more, *pending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await stop_task(more)  # awaited by itself, it could not be told from this task's own cancellation

    def _send_verdicts(self, trace: Provenance, out: Sequence[PublicEvent], stream: PolicyStream[PublicEvent]) -> None:
        stream.decisions()  # the trace has them, each with its origin
        ends: str | None = None
        if ended := stream.terminated:
            # A client reads it. Why a policy failed is the text of its exception: the decision has it.
            reason = ended.reason if ended.action == "terminate" else "failed"
            ends = f"{ended.policy}: {reason}" if reason else ended.policy
        steps: list[PolicyVerdict] = []
        for known in trace.take(out):
            decisions = [_decision(decision) for decision in known.decisions]
            step = PolicyVerdict(known.origin.draft, known.origin.part, known.later, known.events, decisions)
            steps.append(msgspec.structs.replace(step, ends=ends) if known.ends else step)
        self._executor.send(messages.Verdicts(self.opened.task, self._seen, steps))


def _decision(made: Decision) -> RecordedDecision:
    return RecordedDecision(
        policy=made.policy,
        action=made.action,
        reason=made.reason,
        block=made.block,
        tool_id=made.tool_id,
        tool_name=made.tool_name,
        original=made.original,
        final=made.final,
    )


def prepare(work: bytes) -> fork_server.Serve:
    """Import the policies; return what an executor of them does. Raises SettingsError."""
    what = msgspec.msgpack.decode(work, type=PolicyWork)
    links = load_policies(what.policies)

    async def serve(link: fork_server.Link) -> None:
        executor = PolicyExecutor(links, what, send=link.send, marking=link.marking, out_of_memory=link.out_of_memory)
        async for body in link.received():
            executor.handle(messages.to_executor.decode(body))
        with suppress(TimeoutError):
            async with process_clock.timeout(CLOSE_S):
                await executor.close()

    return serve


# Limits the concurrent policy calls of one worker; runs take turns, one call each.
#
# A policy may call a model or a service, and hundreds of concurrent calls would overload it. A run with many calls to
# judge in parallel gets no more turns than a run with one.


class FairSemaphore:
    def __init__(self, most: int, *, report_waiting_s: float) -> None:
        """``most``: maximum concurrent calls. ``report_waiting_s``: how often a waiting run is reported as waiting."""
        self._free = most
        self._report_waiting_s = report_waiting_s
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """Waiting calls by run, next in turn first. No queue is empty."""

    @property
    def waiting(self) -> int:
        return sum(len(calls) for calls in self._waiting.values())

    @asynccontextmanager
    async def slot(self, run: str, report_waiting: Callable[[], object]) -> AsyncGenerator[None]:
        """Hold a slot inside this block. ``report_waiting`` is called periodically while the run waits for it."""
        if self._free and not self._waiting:
            self._free -= 1
        else:
            await self._wait(run, report_waiting)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, run: str, report_waiting: Callable[[], object]) -> None:
        seat = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(run, deque()).append(seat)
        try:
            while not (await asyncio.wait({seat}, timeout=self._report_waiting_s))[0]:
                report_waiting()
        except BaseException:
            if seat.done():
                self._pass_on()  # granted and cancelled at the same moment
            else:
                self._waiting[run].remove(seat)
                if not self._waiting[run]:
                    del self._waiting[run]
            raise

    def _pass_on(self) -> None:
        """Give the slot to the next run, and move that run to the end."""
        if not self._waiting:
            self._free += 1
            return
        run, calls = next(iter(self._waiting.items()))
        calls.popleft().set_result(None)
        if calls:
            self._waiting.move_to_end(run)
        else:
            del self._waiting[run]


# A request from a policy is a normal run, and a matching route would put it under policies too: the policy would judge
# its own question and ask again, endlessly, or wait for the very worker that waits for it. So these runs have no
# policies. A note on the server, written before publishing, marks them; a request cannot set that mark itself. They are
# not visible either, so that listeners do not get the judge's text.


class PolicyClient(Client):
    """A client whose runs have no policies and are not visible."""

    def __init__(self, redis_url: str, keys: Keys, *, run_ttl_ms: int) -> None:
        """Does no IO; connects with the first request. Raises SettingsError."""
        super().__init__(redis_url, prefix=keys.prefix, partitions=keys.partitions)
        self._keys = keys
        self._run_ttl_ms = run_ttl_ms
        self._server = Server(redis_url)

    async def publish(self, request: Generate | Mapping[str, object], *, wait: bool = True) -> Run:
        """See `Client.publish`. Raises RequestInvalid also if the request names policies."""
        with publishing.carrying(request):
            run, request = publishing.with_id(request, new_run_id)
            named = request.policies if isinstance(request, Generate) else request.get("policies")
            if named:
                raise RequestInvalid(
                    "policies", "a run that a policy starts cannot have policies: it would wait for itself"
                )
            if isinstance(request, Generate):
                request = msgspec.structs.replace(request, visible=False)
            else:
                request = {**request, "visible": False}
        # Whichever number of partitions is known here: intake looks the run up by all of them.
        server, note = self._server, mark_asked(self._keys.run(run), ttl_ms=self._run_ttl_ms)
        await retry_until_available(server, lambda: run_script(server, note), what="note of a policy's question")
        return await super().publish(request, wait=wait)

    async def aclose(self) -> None:
        try:
            await super().aclose()
        finally:
            await self._server.aclose()
