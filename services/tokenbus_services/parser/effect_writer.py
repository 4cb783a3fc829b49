"""Effects of the state machine, as writes of the commit: work for others, drafts, decisions, the end of a run."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from tokenbus.bus.keys import Keys
from tokenbus.bus.run_record import (
    ATTEMPT,
    BYPASSED,
    CHOICE,
    DEADLINE,
    ERROR,
    FINISH,
    MODEL,
    PROVIDER,
    RAW,
    RESULT,
    STATUS,
    TENANT,
    TURN,
    RunLifetimes,
    answer_field,
    call_fence,
    call_field,
    history_field,
    so_far_field,
)
from tokenbus.bus.scripts import Arg, Commit
from tokenbus.core.request.bounds import tenant_of
from tokenbus.core.run.effects import (
    CloseAttempt,
    Decide,
    Draft,
    Effect,
    EndRun,
    EndStatus,
    EndWait,
    ForgetRun,
    GiveAnswer,
    MoveDeadline,
    NextTurn,
    ReleaseFromPolicies,
    RunTools,
    SteerCall,
    Wait,
)
from tokenbus.core.run.sealed_run import AnyRun
from tokenbus.core.run.state import RunState
from tokenbus.events.child_runs import TreeEntry, parent_call, root_of
from tokenbus.events.decisions import Decided
from tokenbus.events.decisions import decoder as decided_decoder
from tokenbus.events.decisions import encode as encode_decided
from tokenbus.events.frames import ANY_FRAME, CancelRequested, Control, Drafts, Lost, RawFrame, ToolWork, encode
from tokenbus.events.notices import MOST_FIELD_BYTES, Notice, encode_notice
from tokenbus.events.public import Incomplete, PublicEvent, RunFailedEvent, TerminalEvent, Waiting
from tokenbus.events.sessions import SessionRun, session_run
from tokenbus.events.waits import MAX_TIMEOUT_S, WaitInfo

PARENT_ENDED = "the run whose tool call began this run has ended"
"""Why a child run is cancelled."""
KEEP_WAITS_MS = round((MAX_TIMEOUT_S + 86_400) * 1000)
"""A wait that was listed so long ago is not open any more."""


class EffectWriter:
    """Writes effects of a partition's runs into commits. Has no state but keys and lifetimes."""

    def __init__(self, partition: int, keys: Keys, lifetimes: RunLifetimes) -> None:
        self._keys = keys
        self._turns = keys.topic(partition, "turns")
        self._tools = keys.topic(partition, "tools")
        self._raw = keys.topic(partition, "raw")
        self._control = keys.topic(partition, "control")
        self._events = keys.topic(partition, "events")
        self._parser_lease = keys.lease(partition, "parser")
        self._records = keys.topic(partition, "records")
        self._notices = keys.topic(partition, "notices")
        self._normalizer_lease = keys.lease(partition, "normalizer")
        self._drafts = keys.topic(partition, "drafts")
        self._policy_lease = keys.lease(partition, "policy")
        self._decisions = keys.topic(partition, "decisions")
        self._sessions = keys.topic(partition, "sessions")
        self._partition = partition
        self._lifetimes = lifetimes

    def write(self, machine: AnyRun, effect: Effect, last: bytes, end: TerminalEvent | None, commit: Commit) -> None:
        """Write one effect. ``last``: the run's latest event as published; ``end``: its terminal event, if it came."""
        s, keys = machine.state, self._keys
        run_key = keys.run(s.run)
        match effect:
            case CloseAttempt(turn, attempt):
                self._close_attempt(s.run, turn, attempt, "the turn ended in the text", commit)
            case SteerCall(attempt):
                commit.append(self._control, [s.run, encode(Control(s.run, "steer", attempt))])
            case NextTurn(work, history, so_far, steered):
                self._close_attempt(s.run, work.turn, work.attempt - 1, "a newer attempt began", commit)
                if history is not None:
                    commit.put(run_key, history_field(work.turn), encode(history))
                if so_far is not None:
                    commit.drop(run_key, so_far_field(work.attempt - 1))  # may be large, and is part of the new one
                    commit.put(run_key, so_far_field(work.attempt), encode([so_far]))
                commit.put(run_key, TURN, work.turn, ATTEMPT, work.attempt, RAW, 0)
                if work.choice:
                    commit.put(run_key, CHOICE, work.choice, PROVIDER, s.target.provider, MODEL, s.target.model)
                held = s.gate is not None and not s.gate.bypassed
                work = msgspec.structs.replace(work, tenant=tenant_of(s.accepted.metadata), held=held)
                commit.append(self._turns, [s.run, encode(work)])
                self._lifetimes.renew(commit, *self._kept(s))
                if of_session := session_run(s.run):
                    self._next_turn_in_session(s, of_session, work.turn, commit, steered=steered)
            case RunTools(work):
                self._run_tools(s, work, commit)
            case Wait(info):
                self._wait(s, info, commit)
            case GiveAnswer(block, number, given):
                commit.put(run_key, answer_field(block, number), encode(given))
            case EndWait(wait):
                commit.unwait(run_key, self._waiting(s), run=s.run, wait=wait)
            case MoveDeadline(deadline_ms):
                commit.put(run_key, DEADLINE, deadline_ms)
            case Draft(events, over):
                policy_plan = s.accepted.policy_plan
                traceparent = s.accepted.traceparent if events and events[0].seq == 0 else ""
                drafts = Drafts(policy_plan.names if policy_plan else (), events, over, traceparent)
                self._draft(s.run, encode(drafts), commit)
            case Decide(number, turn, attempt, decision):
                decided = Decided.of(s.run, number, turn, attempt, decision)
                commit.publish_to_topic(self._decisions, encode_decided(decided))
            case ReleaseFromPolicies():
                commit.put(run_key, BYPASSED, 1)
            case EndRun(status):
                self._end(s, status, last, end, commit)
            case ForgetRun():
                self._lifetimes.end(commit, *self._kept(s), self._keys.tape(s.run))  # so that none stays forever

    def _end(self, s: RunState, status: EndStatus, last: bytes, end: TerminalEvent | None, commit: Commit) -> None:
        run_key = self._keys.run(s.run)
        self._close_attempt(s.run, s.turn, s.attempt, f"the run is {status}", commit)
        commit.put(run_key, STATUS, status, RESULT, last, *_summary(s, end))
        self._list_ended(s, commit)
        self._give_up_questions(s, commit)
        self._end_in_tree(s, commit)
        of_session = session_run(s.run)
        self._lifetimes.end(commit, *self._kept(s), of_session=of_session is not None)
        if of_session:
            self._end_in_session(s, of_session, status, commit)
        if s.accepted.record:
            self._lifetimes.end(commit, self._keys.tape(s.run))
        if s.accepted.record or s.accepted.archive:
            commit.append(self._records, [s.run, status])

    def _give_up_questions(self, s: RunState, commit: Commit) -> None:
        """Tell the tools whose question is open, and which left something with it, that nobody will answer."""
        for p in s.calls:
            if p.state and p.wait and p.wait.what == "answer" and not p.wait.held:
                call = p.runs
                work = ToolWork(s.run, s.turn, s.attempt, p.call.block, call.tool_id, call.name, "", state=p.state)
                left = msgspec.structs.replace(work, given_up=True)
                commit.append(self._tools, [s.run, handed_out(s, left)])

    def _end_in_tree(self, s: RunState, commit: Commit) -> None:
        """Cancel the run's children, and ask for its own result if a call waits for it."""
        for child in (p.child for p in s.calls if p.child and not (p.result and p.result.child_end)):
            inputs = (self._events, self._raw, self._control, self._parser_lease, self._normalizer_lease)
            event, notice = msgspec.msgpack.encode(CancelRequested(PARENT_ENDED)), encode(Control(child))
            commit.cancel_child(self._keys.run(child), inputs, run=child, event=event, control_frame=notice)
        if above := parent_call(s.run):
            parent, block = above
            look = ToolWork(parent, 0, 0, block, "", "", "", tenant=tenant_of(s.accepted.metadata), child=s.run)
            commit.append(self._tools, [parent, encode(look)])

    def order_in_tree(self, machine: AnyRun, events: Sequence[PublicEvent], commit: Commit) -> None:
        """Give these events of the run, which the commit publishes, their place among those of its tree. A run without
        children has none. Called before the effects are written.
        """
        s = machine.state
        root = root_of(s.run)
        if root == s.run and not s.children:
            return
        work = [call for effect in machine.effects if isinstance(effect, RunTools) for call in effect.work]
        begins = [call.block for call in work if call.child]
        tree = self._keys.tree(root)
        if root == s.run and s.children == len(begins):
            commit.begin_tree(tree, run=s.run, entry=TreeEntry(s.run, "0-0", s.seq - 1, begins).encode())
        elif events or begins:
            first = f"{events[0].attempt}-{events[0].seq}" if events else f"{s.attempt}-{s.seq}"
            commit.join_tree(tree, run=s.run, entry=TreeEntry(s.run, first, s.seq - 1, begins).encode())

    def _kept(self, s: RunState) -> list[str]:
        """The keys that live as long as the run. A tree's order is the root's."""
        keys = [self._keys.run(s.run), self._keys.log(s.run)]
        return [*keys, self._keys.tree(s.run)] if s.children and parent_call(s.run) is None else keys

    def tell(self, s: RunState, event: TerminalEvent | Waiting, commit: Commit) -> None:
        """Tell the run's webhooks of this event."""
        if s.accepted.webhooks:
            commit.append(self._notices, [s.run, encode_notice(_notice(s, event))])

    def repeat(self, lost: Commit, runs: Collection[str], commit: Commit) -> None:
        """Repeat drafts, decisions, records, notices, and what sessions were told, which has no effect on one that
        knows it. Turns and tool calls are not given out again: the runs end.
        """
        commit.repeat(lost, {self._keys.session(of.ref) for run in runs if (of := session_run(run))})
        for entry in lost.appended(self._drafts):
            for name, data in entry.items():
                if name.decode() in runs:
                    self._draft(name.decode(), data, commit)
        for stream in (self._records, self._notices):
            for entry in lost.appended(stream):
                for name, data in entry.items():
                    if name.decode() in runs:
                        commit.append(stream, [name.decode(), data])
        for data in lost.published_to_topic(self._decisions):
            if decided_decoder.decode(data).run in runs:
                commit.publish_to_topic(self._decisions, data)

    def _end_in_session(self, s: RunState, of: SessionRun, status: EndStatus, commit: Commit) -> None:
        keys, following = self._keys, of.following.id
        commit.end_session_run(
            keys.session(of.ref),
            of_session=keys.of_session(of.ref),
            run_key=keys.run(s.run),
            logs=(keys.log(s.run), keys.log(following)),
            next_key=keys.run(following),
            inputs=(self._events, self._turns, self._parser_lease),
            indexes=self._indexes(s),
            sessions=(keys.sessions(self._partition), keys.sessions(self._partition, tenant_of(s.accepted.metadata))),
            topic=self._sessions,
            run=s.run,
            status=status,
            next_run=following,
            open_ms=self._lifetimes.open_ms,
            keep_ms=self._lifetimes.session_ms,
        )

    def _next_turn_in_session(self, s: RunState, of: SessionRun, turn: int, commit: Commit, *, steered: bool) -> None:
        """Keep the session as long as its run, and let messages that wait steer the turn."""
        keys, keep_ms = self._keys, self._lifetimes.open_ms + self._lifetimes.session_ms
        session, of_session = keys.session(of.ref), keys.of_session(of.ref)
        for key in (session, *of_session):
            commit.expire(key, keep_ms)
        if steered:
            commit.steer_session_run(
                session,
                of_session=of_session,
                log=keys.log(s.run),
                topic=self._sessions,
                run=s.run,
                turn=turn,
                keep_ms=keep_ms,
            )

    def _run_tools(self, s: RunState, work: Sequence[ToolWork], commit: Commit) -> None:
        for call in work:
            commit.put(self._keys.run(s.run), call_field(call.block), call_fence(call.attempt, len(call.answers)))
            commit.append(self._tools, [s.run, handed_out(s, call)])
        if any(call.child for call in work):
            self._keep(s, s.seen_ms, commit)

    def _wait(self, s: RunState, info: WaitInfo, commit: Commit) -> None:
        """Open the wait, and keep the run until some time after the deadline of all its waits."""
        commit.wait(
            self._keys.run(s.run),
            self._waiting(s),
            run=s.run,
            wait=info.wait,
            record=msgspec.json.encode(info),
            since_ms=info.since_ms,
            keep_ms=KEEP_WAITS_MS,
        )
        self._keep(s, info.since_ms, commit)

    def _keep(self, s: RunState, at_ms: int, commit: Commit) -> None:
        """Keep the run until some time after all that it waits for is over. What began to wait in this commit may have
        ended in it.
        """
        children = [s.accepted.begins_runs[p.runs.name] for p in s.calls if p.child and p.result is None]
        waits_ms = max([*children, *(p.wait.deadline_ms - at_ms for p in s.calls if p.wait)], default=0)
        self._lifetimes.renew(commit, *self._kept(s), more_ms=waits_ms)
        if s.accepted.record:
            self._lifetimes.renew(commit, self._keys.tape(s.run), more_ms=waits_ms)
        if of := session_run(s.run):
            for key in (self._keys.session(of.ref), *self._keys.of_session(of.ref)):
                commit.expire(key, self._lifetimes.open_ms + self._lifetimes.session_ms + waits_ms)

    def _waiting(self, s: RunState) -> tuple[str, str]:
        """The indexes of waits: of all and of the run's tenant; without one, of all again."""
        tenant = tenant_of(s.accepted.metadata)
        return self._keys.waiting(self._partition), self._keys.waiting(self._partition, tenant)

    def _indexes(self, s: RunState) -> list[str]:
        """Open and ended runs, of all and of the run's tenant; without one, of all again."""
        keys, partition, tenant = self._keys, self._partition, tenant_of(s.accepted.metadata)
        of_tenant = (keys.open_runs(partition, tenant), keys.ended_runs(partition, tenant))
        return [keys.open_runs(partition), keys.ended_runs(partition), *of_tenant]

    def _list_ended(self, s: RunState, commit: Commit) -> None:
        """List the run as ended, and nothing as waited for."""
        open_runs, ended_runs, *of_tenant = self._indexes(s)
        waiting, tenants_waiting = self._waiting(s)
        commit.end_run(
            self._keys.run(s.run),
            open_runs,
            ended_runs,
            waiting,
            of_tenant=(of_tenant[0], of_tenant[1], tenants_waiting),
            run=s.run,
            keep_ms=self._lifetimes.ended_ms,
        )

    def _draft(self, run: str, data: bytes, commit: Commit) -> None:
        commit.append(self._drafts, [run, data])
        commit.count(self._policy_lease, len(data))

    def _close_attempt(self, run: str, turn: int, attempt: int, reason: str, commit: Commit) -> None:
        lost = encode(RawFrame(turn, attempt, ANY_FRAME, 0, [Lost(reason)]))
        closed = encode(Control(run, "closed", attempt))
        places = (self._raw, self._normalizer_lease, self._control)
        commit.close_attempt(self._keys.run(run), attempt, *places, run=run, lost=lost, control_frame=closed)


def handed_out(s: RunState, call: ToolWork) -> bytes:
    """The call as an entry of `tools` has it."""
    metadata = s.accepted.metadata
    whose = {"tenant": tenant_of(metadata), "metadata": metadata or None, "traceparent": s.accepted.traceparent}
    return encode(msgspec.structs.replace(call, **whose))


def _notice(s: RunState, event: TerminalEvent | Waiting) -> Notice:
    fields: dict[str, object] = msgspec.to_builtins(event)
    data = {name: value for name, value in fields.items() if name not in ("type", "provider_extra")}
    for name in ("arguments", "schema", "text"):  # of a wait; who decides finds them there
        if len(msgspec.json.encode(data.get(name))) > MOST_FIELD_BYTES:
            del data[name]
    metadata = s.accepted.metadata
    if tenant := tenant_of(metadata):
        data["tenant"] = tenant
    if metadata and len(msgspec.json.encode(metadata)) <= MOST_FIELD_BYTES:
        data["metadata"] = metadata
    return Notice(s.accepted.webhooks, f"run.{fields['type']}", event.seq, data)


def _summary(s: RunState, end: TerminalEvent | None) -> list[Arg]:
    """Fields of the run's hash by which an ended run is listed."""
    fields: list[Arg] = []
    if s.target.provider:  # else the run was refused, or its state was unreadable
        fields += [PROVIDER, s.target.provider, MODEL, s.target.model]
    if tenant := tenant_of(s.accepted.metadata):
        fields += [TENANT, tenant]
    if end:
        fields += [FINISH, end.finish]
        error = end.error if isinstance(end, Incomplete | RunFailedEvent) else None
        fields += [ERROR, error.code] if error else []
    return fields
