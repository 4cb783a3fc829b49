"""One state of a deployment on a real server, and for each script a valid call that takes effect on it.

All scenes begin in the same state, so any two of them can race. A new script needs a scene here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tokenbus.bus import scripts
from tokenbus.bus.keys import Keys
from tokenbus.bus.run_record import call_field, task_field
from tokenbus.bus.scripts import (
    Commit,
    RawPart,
    ScriptCall,
    activity,
    dead_letters,
    entries,
    fair_order,
    layout,
    limits,
    policies,
    records,
    requests,
    retention,
    sessions,
    topics,
    webhooks,
    work_queue,
)
from tokenbus.bus.scripts import gateway as gate
from tokenbus.bus.scripts.chain import ChainedStage, chain
from tokenbus.bus.scripts.commit import owe
from tokenbus.bus.scripts.leases import count, note, present, release, renew, withdraw_replay
from tokenbus.bus.scripts.runs import accept, away, index, inputs, timeouts, waits
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus.events.sessions import SessionRun, session_ref

HOUR_MS = 3_600_000
GROUP = "g"
LIMITS = gate.AdmissionLimits(requests_per_minute=60, tokens_per_minute=1000, concurrency=5, budget_nano=10_000)
State = Mapping[str, Any]
"""Values by key: of a stream its ``entries`` and ``groups``, of all others what redis-py makes of them."""


class World:
    """Partition 0 with an open run, one that has ended, one that is not known yet, one that only waits and one that is
    put away, all leases owned, and queues,
    limits and a gateway's client in use."""

    def __init__(self, server: Server, keys: Keys) -> None:
        self.server, self.keys, self.client = server, keys, server.client
        names = [run for run in (f"r{i}" for i in range(200)) if keys.partition_of(run) == 0]
        self.run, self.ended, self.new, self.resting, self.away = names[:5]
        self.normalizer, self.parser, self.policy = (keys.lease(0, name) for name in ("normalizer", "parser", "policy"))
        self.raw, self.events, self.drafts = (keys.topic(0, name) for name in ("raw", "events", "drafts"))
        self.control = keys.topic(0, "control")
        self.queue = keys.requests
        self.tokens: dict[str, str] = {}
        self.ends: dict[str, str] = {}
        """The last entry of each input."""
        self.entries: list[str] = []
        """Of the queue: two that the consumer `a` holds, of which the second is idle, and two unread."""
        self.ended_ms = 0
        """When the ended run ended."""
        self.limited = limits.Scope("provider", keys.limit("provider:p"), 10.0, 60_000, 3)
        self.unbounded = limits.Scope("model", keys.limit("model:m"), 10.0, 60_000)
        self.taken: list[int] = []
        self.use, self.spend = keys.gateway_use("ada"), keys.gateway_spend("ada")
        refs = (session_ref("", f"s{i}") for i in range(200))
        self.session, self.unknown_session = [ref for ref in refs if keys.partition_of(ref) == 0][:2]
        self.session_run = SessionRun(self.session, "0" * 8, 0)
        """The session's open run; `waiting` waits for its end."""
        self.deliveries = keys.webhook_due("a"), keys.webhook_bodies("a")
        self.hold = gate.HoldKeys(keys.gateway_counted(self.run), keys.gateway_held("ada"))

    async def build(self) -> None:
        client, keys = self.client, self.keys
        self.ended_ms = (await client.time())[0] * 1000 - 60_000
        run = {
            "status": "open",
            "attempt": 1,
            "raw": 0,
            "seq": 0,
            "turn": 0,
            "accepted": 1,
            call_field(0): 1,
            "job": "j",
            "wait:0.0": "{}",
            "waits": " 0.0 ",
        }
        await client.hset(keys.run(self.run), mapping=run)
        await client.hset(keys.run(self.ended), mapping={"status": "completed", "attempt": 1, "raw": 0, "seq": 0})
        rests = {"status": "open", "attempt": 1, "closed": 1}
        await client.hset(keys.run(self.resting), mapping=rests)
        await client.hset(keys.run(self.away), mapping={**rests, "away": "state"})
        await client.zadd(keys.away(0), {self.away: 1})
        await client.pexpire(keys.away(0), HOUR_MS)
        for each in (self.run, self.ended, self.resting, self.away):
            await client.pexpire(keys.run(each), HOUR_MS)
        await client.hset(keys.run(self.ended), "ended", self.ended_ms)
        await client.zadd(keys.open_runs(0), {self.ended: 1})
        await client.zadd(keys.waiting(0), {f"{self.run}/0.0": 1})
        await client.pexpire(keys.waiting(0), HOUR_MS)
        stages = (self.normalizer, self.raw), (self.parser, self.events), (self.policy, self.drafts)
        for lease, stream in stages:
            self.ends[stream] = (await client.xadd(stream, {self.run: "1234"})).decode()
            call = scripts.acquire(lease, stream, owner="a", ttl_ms=HOUR_MS, mirror=GROUP)
            self.tokens[lease] = (await run_script(self.server, call))[0].decode()
            read = {"offset": self.ends[stream], "watermark": self.ends[stream], "arrived": 4, "done": 4}
            await client.hset(lease, mapping={**read, "replays": 2})
        self.later = (await client.xadd(self.drafts, {self.run: "1234"})).decode()
        await client.hincrby(self.policy, "arrived", 4)
        await self._fill_queue()
        await self._begin_session()
        due, bodies = self.deliveries
        await client.zadd(due, {"m1": 1, "m2": 2, "gone": 3})
        await client.hset(bodies, mapping={"m1": "{}", "m2": "{}"})
        for key in self.deliveries:
            await client.pexpire(key, HOUR_MS)
        call = limits.reserve([self.limited], member="m0", worker="w", tokens=1000, lease_ms=HOUR_MS)
        self.taken = [int(until) for until in (await run_script(self.server, call))[1:]]
        await run_script(self.server, self.admit(self.run))
        await run_script(self.server, layout_join(self, epoch=1))
        await client.hset(keys.meta, "announced", 8)

    async def _begin_session(self) -> None:
        client, keys, ref, run = self.client, self.keys, self.session, self.session_run
        log, appends, queue, history = keys.of_session(ref)
        state = {"made": run.made, "version": 1, "runs": 1, "run": run.id, "seq": 1, "waiting": len(self.work)}
        await client.hset(keys.session(ref), mapping=state)
        await client.xadd(log, {"__data__": "{}"}, id="1-0")
        await client.hset(appends, mapping={"waiting": "{}", "!waiting": self.work, "^waiting": 1})
        await client.zadd(queue, {"waiting": 5})
        await client.hset(history, "in:0", "[]")
        await client.hset(keys.run(run.id), mapping={"status": "open", "attempt": 1, "raw": 0, "seq": 1, "turn": 0})
        await client.xadd(keys.log(run.id), {"__data__": "{}"}, id="1-0")
        for key in (keys.session(ref), log, appends, queue, history, keys.run(run.id), keys.log(run.id)):
            await client.pexpire(key, HOUR_MS)

    @property
    def work(self) -> bytes:
        """What a message starts; see `RunCreation.session_work`."""
        return msgspec.msgpack.encode(("{}", "begun", 0, 0, "", 1, ["provider", "p"]))

    async def _fill_queue(self) -> None:
        client = self.client
        await client.xgroup_create(self.queue, GROUP, id="0-0", mkstream=True)
        for name in ("0", "1", "2", "3"):
            request = f'{{"type":"generate","id":"{name}","metadata":{{"tenant":"t{name}"}}}}'
            self.entries.append((await client.xadd(self.queue, {"__data__": request})).decode())
        await client.xreadgroup(GROUP, "a", {self.queue: ">"}, count=2)
        await client.xclaim(self.queue, GROUP, "a", 0, [self.entries[1]], idle=HOUR_MS)
        await client.xgroup_createconsumer(self.queue, GROUP, "idle")

    def admit(self, run: str, above: Sequence[str] = ()) -> ScriptCall:
        hold = gate.HoldKeys(self.keys.gateway_counted(run), self.hold.held)
        reserved = gate.Reservation(client="ada", estimate_nano=1000, hold_ms=HOUR_MS, keep_ms=HOUR_MS)
        return gate.admit(
            *(self.use, self.spend, run, LIMITS),
            gateway="gw",
            lease_ms=HOUR_MS,
            hold=hold,
            reserved=reserved,
            above=above,
        )

    def held(self) -> dict[str, Any]:
        """The consumer's own first entry."""
        return {"group": GROUP, "consumer": "a", "ids": [self.entries[0]]}

    def of_run(self) -> dict[str, Any]:
        return {"run": self.run, "frame": b"frame"}


@dataclass(frozen=True)
class Twice:
    """What was before, after one and after two equal calls, and both replies."""

    world: World
    none: State
    one: State
    two: State
    replies: tuple[Any, Any]

    def grows(self, *streams: str) -> None:
        """Each call appends an equal entry to each of these."""
        for key in streams:
            before, *added = (_entries(state, key) for state in (self.none, self.one, self.two))
            assert [len(each) for each in added] == [len(before) + 1, len(before) + 2]
            assert added[1][-1][1] == added[1][-2][1]

    def adds(self, key: str, name: str) -> None:
        """Each call adds equally much to this field."""
        none, one, two = (int(state.get(key, {}).get(name.encode(), 0)) for state in (self.none, self.one, self.two))
        assert two - one == one - none != 0


@dataclass(frozen=True)
class Scene:
    """A valid call. ``second``: its second answer, if that is another. ``again``: asserts what a second call does if
    that takes effect too. ``times``: hash fields, and ends of the names of sorted sets, that hold the server's time.
    ``silent``: its only effect is such a time. ``lasting``: what it achieved, which no other script may undo."""

    call: Callable[[World], ScriptCall]
    second: Callable[[World, Any], Any] | None = None
    again: Callable[[Twice], None] | None = None
    times: Sequence[str] = field(default=())
    silent: bool = False
    lasting: Callable[[World, State], bool] | None = None


def _entries(state: State, key: str) -> list[Any]:
    return state[key]["entries"] if key in state else []


def _is(answer: Any) -> Callable[[World, Any], Any]:
    return lambda _world, _first: answer


def _stopped(w: World, state: State) -> bool:
    run = state[w.keys.run(w.run)]
    return run[b"status"] != b"open" and run[b"closed"] == run[b"attempt"]


def _has_its_task(w: World, state: State) -> bool:
    return state[w.keys.run(w.run)][task_field(0).encode()] == b"t"


def _has_no_call(w: World, state: State) -> bool:
    return call_field(0).encode() not in state[w.keys.run(w.run)]


def _freed(w: World, state: State) -> bool:
    return b"m0" not in state.get(w.limited.held, {})


def _holds_nothing(w: World, state: State) -> bool:
    return w.run.encode() not in state.get(w.hold.held, {})


def _left_the_queue(w: World, state: State) -> bool:
    entry = w.entries[0].encode()
    queue = state[w.queue]
    return entry not in dict(queue["entries"]) and entry not in queue["groups"][GROUP.encode()]["pending"]


def _listed_by_its_end(w: World, state: State) -> bool:
    run, ended = w.ended.encode(), state.get(w.keys.ended_runs(0), {})
    listed = ended.get(run) == w.ended_ms or w.keys.run(w.ended) not in state  # it may have made room since
    return run not in state.get(w.keys.open_runs(0), {}) and listed


def _known(w: World, state: State) -> bool:
    return b"status" in state[w.keys.run(w.new)]


def layout_join(w: World, epoch: int) -> ScriptCall:
    return layout.join(
        w.keys.meta, partitions=4, wire_version=1, seen="seen:w", epoch=epoch, numbers="4", ever="4", spread=1
    )


def _commit(w: World) -> ScriptCall:
    commit = Commit(w.policy, w.drafts)
    commit.append(w.events, [w.run, b"verdict"])
    commit.arrived(w.parser, 7)
    commit.publish(w.keys.log(w.run), "1-0", b"{}", [w.keys.topic(0, "decisions")])
    commit.expire(w.keys.log(w.run), HOUR_MS)
    commit.put(w.keys.run(w.run), "note", "1")
    return of_policy(w, commit)


def of_policy(w: World, commit: Commit) -> ScriptCall:
    return commit.call(
        token=w.tokens[w.policy],
        ttl_ms=HOUR_MS,
        begin=w.ends[w.drafts],
        end=w.later,
        watermark=w.ends[w.drafts],
        entries=1,
        size=4,
        mirror=GROUP,
        entries_read=True,
        topic_entries=100,
    )


def _chain(w: World) -> ScriptCall:
    def stage(lease: str, stream: str, commit: Commit) -> ChainedStage:
        return ChainedStage(w.tokens[lease], w.ends[stream], w.ends[stream], "", 1, 4, commit, GROUP)

    one, two = Commit(w.normalizer, w.raw), Commit(w.parser, w.events)
    one.append(w.events, [w.run, b"four"])
    one.arrived(w.parser, 4)
    two.publish(w.keys.log(w.run), "1-0", b"{}", [w.keys.topic(0, "visible")])
    two.expire(w.keys.log(w.run), HOUR_MS)
    return chain(
        stage(w.normalizer, w.raw, one),
        stage(w.parser, w.events, two),
        [RawPart(w.run, w.keys.run(w.run), 1, 0, final=False, data=b"four", writer="w")],
        flush="f",
        ttl_ms=HOUR_MS,
        entries_read=True,
        topic_entries=100,
    )


def _accept(w: World) -> ScriptCall:
    k = w.keys
    return accept.accept(
        k.run(w.new),
        w.events,
        k.topic(0, "turns"),
        w.parser,
        k.log(w.new),
        k.run(w.new),
        k.open_runs(0),
        k.ended_runs(0),
        [k.open_runs(0, "ada"), k.ended_runs(0, "ada")],
        run=w.new,
        ttl_ms=HOUR_MS,
        frame=b"begun",
        work=b"turn",
        accepted_ms=2,
        epoch=1,
        fields=["provider", "p"],
    )


def append_to(w: World, kind: Any, **more: Any) -> ScriptCall:
    k, run, ref = w.keys, w.session_run, more.pop("ref", w.session)
    known = ref == w.session
    last, following = (run.id, run.following.id) if known else (f"{ref}.{run.made}.0",) * 2
    log, appends, queue, history = k.of_session(ref)
    given: dict[str, Any] = {
        "epoch": 1,
        "version": "1" if known else "",
        "runs": int(known),
        "open_run": run.id if known else "",
        "lost": 0,
        "next_run": following,
        "append": kind,
        "kind": kind,
        "item": b"{}",
        "work": b"",
        "when_busy": "",
        "heard": "",
        "heard_characters": "",
        "frame": b"cancel",
        "control_frame": b"stop",
        "subject": "",
        "as_of": "",
        "open_ms": HOUR_MS,
        "keep_ms": HOUR_MS,
        "topic_entries": 1000,
        "renewed": "",
        "fields": [],
    }
    return sessions.append(
        k.session(ref),
        log,
        appends,
        queue,
        history,
        k.run(last),
        k.log(last),
        k.run(following),
        k.log(following),
        w.events,
        k.topic(0, "turns"),
        w.raw,
        w.control,
        w.parser,
        w.normalizer,
        k.open_runs(0),
        k.ended_runs(0),
        k.sessions(0),
        k.topic(0, "sessions"),
        [k.open_runs(0, "ada"), k.ended_runs(0, "ada"), k.sessions(0, "ada")],
        **{**given, **more},
    )


def _fate_of(append: str) -> Callable[[World, State], bool]:
    """The append was accepted: nothing takes that back but the deletion of the session."""
    return lambda w, state: (
        append.encode() in state[w.keys.of_session(w.session)[1]] or b"deleting" in state[w.keys.session(w.session)]
    )


def _refuse(w: World) -> ScriptCall:
    log, appends, *_ = w.keys.of_session(w.session)
    places = w.keys.session(w.session), log, appends, w.keys.log(w.session_run.id), w.keys.topic(0, "sessions")
    why: dict[str, Any] = {"reason": "refused", "problem": b'"bad"', "ttl_ms": HOUR_MS, "topic_entries": 1000}
    return sessions.refuse(*places, open_run=w.session_run.id, append="bad", **why)


def _remember(w: World) -> ScriptCall:
    history = w.keys.of_session(w.session)[3]
    return sessions.remember(w.keys.session(w.session), history, made=w.session_run.made, name="out:0", messages=b"[]")


def end_session_run(w: World) -> ScriptCall:
    """The parser's commit at the end of the session's run, which starts the next one with what waits."""
    return of_parser(w, session_run_ends(w))


def session_run_ends(w: World) -> Commit:
    k, run, commit = w.keys, w.session_run, Commit(w.parser, w.events)
    commit.end_session_run(
        k.session(w.session),
        of_session=k.of_session(w.session),
        run_key=k.run(run.id),
        logs=(k.log(run.id), k.log(run.following.id)),
        next_key=k.run(run.following.id),
        inputs=(w.events, k.topic(0, "turns"), w.parser),
        indexes=2 * [k.open_runs(0), k.ended_runs(0)],
        sessions=(k.sessions(0), k.sessions(0, "ada")),
        topic=k.topic(0, "sessions"),
        run=run.id,
        status="completed",
        next_run=run.following.id,
        open_ms=HOUR_MS,
        keep_ms=HOUR_MS,
    )
    return commit


def steer_session_run(w: World) -> ScriptCall:
    """The parser's commit at the beginning of a turn that what waits may steer."""
    commit = Commit(w.parser, w.events)
    commit.steer_session_run(
        w.keys.session(w.session),
        of_session=w.keys.of_session(w.session),
        log=w.keys.log(w.session_run.id),
        topic=w.keys.topic(0, "sessions"),
        run=w.session_run.id,
        turn=1,
        keep_ms=HOUR_MS,
    )
    return of_parser(w, commit)


def _commit_waits(w: World) -> ScriptCall:
    """The parser's commit that opens a wait and closes another."""
    commit, k = Commit(w.parser, w.events), w.keys
    indexes = k.waiting(0), k.waiting(0, "ada")
    commit.wait(k.run(w.run), indexes, run=w.run, wait="1.0", record=b"{}", since_ms=5, keep_ms=HOUR_MS)
    commit.unwait(k.run(w.run), indexes, run=w.run, wait="0.0")
    return of_parser(w, commit)


def _decide(w: World) -> ScriptCall:
    """Somebody decides what the open run waits for."""
    return waits.decide(
        w.keys.run(w.run),
        w.events,
        w.parser,
        w.keys.decision(w.run, "d1"),
        [w.keys.waiting(0)],
        run=w.run,
        wait="0.0",
        frame=b"frame",
        fate=b'{"id":"d1"}',
    )


def put_away(w: World, runs: Sequence[str], state: bytes = b"state", children: Sequence[str] = ()) -> ScriptCall:
    """The parser puts these runs away, each of which waits for these children."""
    return away.put_away(
        w.parser,
        w.events,
        w.keys.away(0),
        [away.AwayRun(w.keys.run(run), run, state, 9, [w.keys.run(child) for child in children]) for run in runs],
        token=w.tokens[w.parser],
        offset=w.ends[w.events],
        forget=b"forget",
        ttl_ms=HOUR_MS,
    )


def _put_back(w: World) -> ScriptCall:
    return away.put_back(w.keys.run(w.away), w.events, w.parser, w.keys.away(0), run=w.away)


def of_parser(w: World, commit: Commit) -> ScriptCall:
    return commit.call(
        token=w.tokens[w.parser],
        ttl_ms=HOUR_MS,
        begin=w.ends[w.events],
        end=w.ends[w.events],
        watermark=w.ends[w.events],
        entries=0,
        size=0,
        mirror=GROUP,
        entries_read=True,
        topic_entries=100,
        owed="",
        owes="ended",
    )


def _cancel(w: World, run: str) -> ScriptCall:
    places = w.keys.run(run), w.events, w.raw, w.control, w.parser, w.normalizer
    return accept.cancel(*places, run=run, awaited_ms=HOUR_MS, frame=b"cancel", control_frame=b"stop", epoch=1)


def _append_raw(w: World) -> ScriptCall:
    part = RawPart(w.run, w.keys.run(w.run), 1, 0, final=True, data=b"four", writer="w")
    return scripts.append_raw(w.raw, w.normalizer, [part], policy_lease=w.policy)


def _list_open(w: World) -> ScriptCall:
    k = w.keys
    run = index.OpenRun(k.run(w.run), w.run, 1, "p", "m", "ada", k.open_runs(0, "ada"))
    return index.list_open(k.open_runs(0), [run], ttl_ms=HOUR_MS)


def _unlist_ended(w: World) -> ScriptCall:
    k = w.keys
    runs = [w.ended, w.run]
    places = k.open_runs(0), k.ended_runs(0), k.away(0)
    return index.unlist_ended(*places, [k.run(run) for run in runs], keep_ms=HOUR_MS, runs=runs)


def _count_use(w: World) -> ScriptCall:
    used = gate.RunUse(seq=1, fresh=10, cache_read=0, cache_write=0, output=5, prices=(1.0, 1.0, 1.0, 2.0), ended=True)
    return gate.count_use(w.hold, w.run, spend=w.spend, use=w.use, tokens_per_minute=1000, used=used, keep_ms=HOUR_MS)


def _reserve(scope: limits.Scope) -> ScriptCall:
    return limits.reserve([scope], member="m1", worker="w", tokens=600, lease_ms=HOUR_MS)


def _verdicts(w: World) -> ScriptCall:
    places = w.keys.run(w.run), w.events, w.parser, w.policy
    return inputs.append_verdicts(*places, token=w.tokens[w.policy], **w.of_run())


def _input(w: World) -> dict[str, Any]:
    return {"run_key": w.keys.run(w.run), "events": w.events, "parser_lease": w.parser, **w.of_run()}


def _expire(w: World) -> ScriptCall:
    places = w.keys.run(w.run), w.events, w.raw, w.control, w.parser, w.normalizer
    return timeouts.expire(*places, control_frame=b"stop", **w.of_run())


def _lose_attempt(w: World) -> ScriptCall:
    places = w.keys.run(w.run), w.raw, w.control, w.normalizer
    return timeouts.lose_attempt(*places, attempt=1, control_frame=b"stop", **w.of_run())


def _forget(w: World) -> ScriptCall:
    runs = [w.ended, w.run]
    keys = [w.keys.kept_of(run) for run in runs]
    return retention.forget(w.keys.ended_runs(0), keys, runs=runs)


def _erase(w: World, run: str) -> ScriptCall:
    keys = (w.keys.run(run), w.keys.log(run), w.keys.tape(run), w.keys.tree(run))
    return retention.erase(*keys, [w.keys.ended_runs(0)], run=run)


def _erase_ended(w: World) -> ScriptCall:
    return _erase(w, w.ended)


def _erase_open(w: World) -> ScriptCall:
    return _erase(w, w.run)


def _judge(w: World) -> tuple[tuple[str, str], str]:
    return (w.keys.run(w.run), w.policy), w.tokens[w.policy]


def _claimed_once(t: Twice) -> None:
    """What a first call claimed is the consumer's, and the second does not claim it, for it is not idle."""
    first, second = ([entry[0] for entry in reply[-1]] for reply in t.replies)
    assert [entry.decode() for entry in first] == [t.world.entries[1]]
    assert second == []
    assert t.two[t.world.queue] == t.one[t.world.queue]
    _owned(t, first)


def _the_next_one_due(t: Twice) -> None:
    """The first delivery is due again only after its lease, so the second call takes another."""
    (_, _, first, _), (_, _, second, _) = t.replies
    assert (first, second) == (b"m1", b"m2")
    due, _ = t.world.deliveries
    assert set(t.two[due]) == set(t.none[due])


def _taken_on(t: Twice) -> None:
    first, second = ([entry[0] for entry in reply[-1]] for reply in t.replies)
    assert len({*first, *second}) == 2
    _owned(t, [*first, *second])


def _owned(t: Twice, ids: Sequence[bytes]) -> None:
    pending = t.two[t.world.queue]["groups"][GROUP.encode()]["pending"]
    assert {pending[entry][0] for entry in ids} == {b"b"}


def _newer_token(t: Twice) -> None:
    first, second = (int(reply[0].partition(b":")[0]) for reply in t.replies)
    assert second > first
    assert t.two[t.world.parser][b"token"] == t.replies[1][0]


def _already(t: Twice) -> None:
    assert [reply[0] for reply in t.replies] == [b"ok", b"already"]
    assert t.two == t.one


def _paid_twice(t: Twice) -> None:
    key = t.world.unbounded.key
    assert [reply[0] for reply in t.replies] == [b"ok", b"ok"]
    assert int(t.two[key][b"tokens"]) - int(t.one[key][b"tokens"]) == 600_000


def _spent_twice(t: Twice) -> None:
    key = t.world.unbounded.key
    assert t.replies == (0, 0)
    assert int(t.two[key][b"till"]) - int(t.one[key][b"till"]) == HOUR_MS // 100


def _returned_twice(t: Twice) -> None:
    key = t.world.limited.key
    none, one, two = (int(state[key][b"tokens"]) for state in (t.none, t.one, t.two))
    assert none - one == one - two == 10_000


def _admitted_twice(t: Twice) -> None:
    """Two of the minute, but one place and one reservation."""
    assert [reply[0] for reply in t.replies] == [b"", b""]
    assert t.replies[0][2] - t.replies[1][2] == 1
    assert t.two[f"{t.world.use}:open"].keys() == t.one[f"{t.world.use}:open"].keys()
    assert t.two[t.world.hold.held] == t.one[t.world.hold.held]


def _child_admitted_once(t: Twice) -> None:
    """One of the minute, one place and one reservation."""
    assert [reply[0] for reply in t.replies] == [b"", b""]
    assert t.two[t.world.use] == t.one[t.world.use]
    assert t.two[f"{t.world.use}:open"].keys() == t.one[f"{t.world.use}:open"].keys()
    assert t.two[t.world.hold.held] == t.one[t.world.hold.held]


def _one_lower(t: Twice) -> None:
    t.adds(t.world.normalizer, "replays")
    assert t.two[t.world.normalizer][b"replays"] == b"0"


SCENES: dict[str, list[Scene]] = {
    "accept": [Scene(_accept, second=_is(b"open"), lasting=_known)],
    "accept.mark_asked": [Scene(lambda w: accept.mark_asked(w.keys.run(w.new), ttl_ms=HOUR_MS), second=_is(0))],
    "accept.cancel": [Scene(lambda w: _cancel(w, w.run), lasting=_stopped), Scene(lambda w: _cancel(w, w.new))],
    "activity.count_activity": [
        Scene(
            lambda w: activity.count_activity(w.keys.activity(1), {"runs": 2}, {"open": 3}),
            again=lambda t: t.adds(t.world.keys.activity(1), "runs"),
        )
    ],
    "attempt_fence.append_raw": [Scene(_append_raw, second=lambda _, first: [b"already", *first[1:]])],
    "attempt_fence.take_job": [Scene(lambda w: scripts.take_job(w.keys.run(w.run), attempt=1, writer="b"))],
    "away.put_away": [
        Scene(lambda w: put_away(w, [w.resting]), second=_is(0)),
        Scene(lambda w: put_away(w, [w.resting], children=[w.run]), second=_is(0)),
    ],
    "away.put_back": [Scene(_put_back, second=_is(0))],
    "chain": [Scene(_chain, second=lambda _, first: [b"already", *first[1:]], times=["until"])],
    "commit": [
        Scene(_commit, second=lambda w, _: [b"already", w.later.encode()], times=["until"]),
        Scene(steer_session_run, second=lambda w, _: [b"already", w.ends[w.events].encode()], times=["until"]),
        Scene(end_session_run, second=lambda w, _: [b"already", w.ends[w.events].encode()], times=["until"]),
        Scene(_commit_waits, second=lambda w, _: [b"already", w.ends[w.events].encode()], times=["until"]),
    ],
    "commit.owe": [
        Scene(
            lambda w: owe(
                w.policy, w.keys.owed(0, "policy"), token=w.tokens[w.policy], name="1", part=b"part", ttl_ms=HOUR_MS
            )
        )
    ],
    "dead_letters.add": [
        Scene(
            lambda w: dead_letters.add(w.keys.dead, w.keys.added("1"), most=100, keep_ms=HOUR_MS, data=b"{}"),
            second=_is(b""),
        )
    ],
    "dead_letters.add_rejected": [
        Scene(
            lambda w: dead_letters.add_rejected(
                *(w.keys.dead, w.keys.rejected, w.keys.added("1")),
                most=100,
                most_rejected=10,
                keep_ms=HOUR_MS,
                data=b"{}",
            ),
            second=_is(b""),
        )
    ],
    "entries.field_sizes": [Scene(lambda w: entries.field_sizes(w.queue, entry=w.entries[0]))],
    "entries.find_request": [Scene(lambda w: entries.find_request(w.queue, entry=w.entries[0]))],
    "entries.ids": [Scene(lambda w: entries.ids(w.queue, after="0-0", last="+", count=9))],
    "entries.value": [Scene(lambda w: entries.value(w.queue, entry=w.entries[0], place=2))],
    "fair_order.put_back": [Scene(lambda w: fair_order.put_back(w.queue, "requests", **w.held()), second=_is(0))],
    "fair_order.reclaim": [
        Scene(
            lambda w: fair_order.reclaim(
                w.queue, "requests", group=GROUP, consumer="b", idle_ms=60_000, start="-", count=10
            ),
            again=_claimed_once,
        )
    ],
    "fair_order.take": [
        Scene(lambda w: fair_order.take(w.queue, "requests", group=GROUP, consumer="b", count=1), again=_taken_on)
    ],
    "gateway.admit": [
        Scene(lambda w: w.admit("g1"), again=_admitted_twice),
        Scene(lambda w: w.admit("g1~0", above=["g1"]), again=_child_admitted_once),
    ],
    "gateway.count_use": [Scene(_count_use, second=_is(0), lasting=_holds_nothing)],
    "gateway.hold": [
        Scene(lambda w: gate.hold_longer(w.hold, w.run, keep_ms=2 * HOUR_MS), times=[":ends"], silent=True)
    ],
    "gateway.put_key": [
        Scene(lambda w: gate.put_key(w.keys.gateway_keys, key_id="k", before=b"", entry=b"{}"), second=_is(0))
    ],
    "gateway.release": [
        Scene(lambda w: gate.release(w.hold, w.run, ended=True), lasting=_holds_nothing),
        Scene(lambda w: gate.release(w.hold, w.run, ended=False)),
    ],
    "gateway.renew_open": [
        Scene(
            lambda w: gate.renew_open(w.use, [w.run, "left"], gateway="gw", lease_ms=HOUR_MS),
            times=[":open"],
            silent=True,
        )
    ],
    "index.list_open": [Scene(_list_open)],
    "index.unlist_ended": [Scene(_unlist_ended, lasting=_listed_by_its_end)],
    "inputs.append_verdicts": [Scene(_verdicts, again=lambda t: t.grows(t.world.events))],
    "inputs.keep_task": [
        Scene(lambda w: inputs.keep_task(w.keys.run(w.run), block=0, attempt=1, task="t"), lasting=_has_its_task)
    ],
    "inputs.tool_progress": [
        Scene(lambda w: inputs.tool_progress(**_input(w), block=0, attempt=1), again=lambda t: t.grows(t.world.events))
    ],
    "inputs.tool_result": [
        Scene(lambda w: inputs.tool_result(**_input(w), block=0, attempt=1), second=_is(0), lasting=_has_no_call)
    ],
    "layout.begin_added": [Scene(lambda w: layout.begin_added(w.keys.lease(0, "added")))],
    "layout.change": [
        Scene(lambda w: layout.change(w.keys.meta, epoch=1, announced="", fields=["spread", 2]), second=_is(0))
    ],
    "layout.fence": [Scene(lambda w: layout.fence(w.parser, epoch=2))],
    "layout.join": [Scene(lambda w: layout_join(w, epoch=2))],
    "leases.acquire": [
        Scene(
            lambda w: scripts.acquire(w.parser, w.events, owner="a", ttl_ms=HOUR_MS, mirror=GROUP), again=_newer_token
        )
    ],
    "leases.count": [
        Scene(lambda w: count(w.parser, field="tries"), again=lambda t: t.adds(t.world.parser, "tries")),
    ],
    "leases.note": [Scene(lambda w: note(w.parser, field="note", value="1"), second=_is(0))],
    "leases.present": [
        Scene(lambda w: present(w.keys.members(GROUP), member="a", ttl_ms=HOUR_MS), times=[f"members:{GROUP}"])
    ],
    "leases.release": [Scene(lambda w: release(w.parser, token=w.tokens[w.parser]))],
    "leases.renew": [
        Scene(
            lambda w: renew(w.parser, w.events, token=w.tokens[w.parser], ttl_ms=HOUR_MS), times=["until"], silent=True
        )
    ],
    "leases.withdraw_replay": [
        Scene(lambda w: withdraw_replay(w.normalizer, token=w.tokens[w.normalizer], count="replays"), again=_one_lower)
    ],
    "limits.pause": [Scene(lambda w: limits.pause(w.limited.key, ms=HOUR_MS), times=["paused"])],
    "limits.refund": [
        Scene(
            lambda w: limits.refund([w.limited], member="m0", left=10, taken=w.taken),
            again=_returned_twice,
            lasting=_freed,
        )
    ],
    "limits.renew": [
        Scene(
            lambda w: limits.renew(w.limited.held, lease_ms=HOUR_MS, members=["m0", "gone"]),
            times=[":held"],
            silent=True,
        )
    ],
    "limits.reserve": [
        Scene(lambda w: _reserve(w.limited), again=_already),
        Scene(lambda w: _reserve(w.unbounded), again=_paid_twice),
    ],
    "limits.spend": [
        Scene(lambda w: limits.spend(w.unbounded.key, size=10, most=1000, period_ms=HOUR_MS), again=_spent_twice)
    ],
    "policies.count_start": [
        Scene(
            lambda w: policies.count_policy_start(*_judge(w)[0], token=_judge(w)[1], policy="p", starts=2, failed_at=9)
        )
    ],
    "policies.note": [Scene(lambda w: policies.note_place(*_judge(w)[0], token=_judge(w)[1], place="alone"))],
    "policies.policy_starts": [
        Scene(lambda w: policies.policy_starts(*_judge(w)[0], token=_judge(w)[1], policies=["p"]))
    ],
    "records.index_record": [
        Scene(
            lambda w: records.index_record(
                w.keys.records, w.keys.record_entries, keep_ms=10**13, most=9, run=w.run, at_ms=1, entry=b"{}"
            )
        )
    ],
    "requests.publish": [
        Scene(lambda w: requests.publish(w.queue, requests=[100, b"{}", "ada"]), again=lambda t: t.grows(t.world.queue))
    ],
    "retention.erase": [Scene(_erase_ended), Scene(_erase_open, silent=True)],
    "retention.forget": [Scene(_forget)],
    "retention.memory": [Scene(lambda w: retention.memory(w.parser, share=0.8, most=0))],
    "sessions.append": [
        Scene(lambda w: append_to(w, "message", work=w.work), second=_is(b"known"), lasting=_fate_of("message")),
        Scene(lambda w: append_to(w, "message", work=w.work, when_busy="steer_now"), second=_is(b"known")),
        Scene(
            lambda w: append_to(w, "message", work=w.work, append="now", when_busy="interrupt"),
            second=_is(b"known"),
        ),
        Scene(lambda w: append_to(w, "interrupt"), second=_is(b"known")),
        Scene(lambda w: append_to(w, "withdraw", subject="waiting"), second=_is(b"known")),
        Scene(lambda w: append_to(w, "add", work=b"{}"), second=_is(b"known"), lasting=_fate_of("add")),
        Scene(lambda w: append_to(w, "rewrite", work=b"[]", subject="0"), second=_is(b"known")),
        Scene(lambda w: append_to(w, "delete"), second=_is(b"known")),
        Scene(lambda w: append_to(w, "configure", fields=["version", 2]), second=_is(b"known")),
        Scene(
            lambda w: append_to(w, "configure", ref=w.unknown_session, work=b"[]", fields=["version", 1]),
            second=_is(b"known"),
        ),
    ],
    "sessions.read_history": [
        Scene(
            lambda w: sessions.read_history(
                w.keys.of_session(w.session)[3], before=1, oldest=0, most_runs=9, most_bytes=99, fields=["edits"]
            )
        )
    ],
    "sessions.refuse": [Scene(_refuse, second=_is(b"known"), lasting=_fate_of("bad"))],
    "sessions.remember": [Scene(_remember)],
    "timeouts.append_timeout": [
        Scene(
            lambda w: timeouts.append_timeout(w.keys.run(w.run), w.events, w.parser, **w.of_run()),
            again=lambda t: t.grows(t.world.events),
        )
    ],
    "timeouts.expire": [Scene(_expire, second=_is(b"expiring"), lasting=_stopped)],
    "timeouts.lose_attempt": [Scene(_lose_attempt, second=_is(b"closed"))],
    "timeouts.read_policy_stage": [Scene(lambda w: timeouts.read_policy_stage(w.policy))],
    "waits.decide": [Scene(_decide)],
    "waits.confirm": [Scene(lambda w: waits.confirm(w.keys.decision(w.run, "d1")), silent=True)],
    "waits.refuse": [Scene(lambda w: waits.refuse(w.keys.decision(w.run, "d2"), answer=b'{"problem":"no"}'))],
    "topics.ends": [Scene(lambda w: topics.ends([w.raw, w.events]))],
    "topics.mirror_offset": [
        Scene(
            lambda w: topics.mirror_offset(w.normalizer, w.raw, group=GROUP, offset=w.ends[w.raw], after=w.ends[w.raw])
        )
    ],
    "topics.trimmed": [Scene(lambda w: topics.trimmed([w.raw, w.events], cursors=["0-0", "0-0"]))],
    "webhooks.due": [Scene(lambda w: webhooks.due(*w.deliveries, most=1, lease_ms=HOUR_MS), again=_the_next_one_due)],
    "work_queue.claim": [
        Scene(
            lambda w: work_queue.claim(w.queue, group=GROUP, consumer="b", idle_ms=60_000, start="0-0", count=10),
            again=_claimed_once,
        )
    ],
    "work_queue.finish": [
        Scene(lambda w: work_queue.finish(w.queue, **w.held()), second=_is(0), lasting=_left_the_queue)
    ],
    "work_queue.hand_back": [Scene(lambda w: work_queue.hand_back(w.queue, **w.held()), second=_is(0))],
    "work_queue.heartbeat": [Scene(lambda w: work_queue.heartbeat(w.queue, **w.held()), silent=True)],
    "work_queue.mark": [
        Scene(lambda w: work_queue.mark(w.queue, group=GROUP, consumer="a", entry=w.entries[0], begun=True))
    ],
    "work_queue.requeue": [Scene(lambda w: work_queue.requeue(w.queue, **w.held()), second=_is(0))],
    "work_queue.retire": [Scene(lambda w: work_queue.retire(w.queue, group=GROUP, consumer="idle"))],
}
"""By the script's name."""
