"""The scripts at the largest arguments, and on the largest state, that the code allows: each as a call on a `World`.

A script in `SMALL` costs the same whatever its arguments and the state are: its scene is its largest call.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from tests.contract.bus.scripts.scenes import (
    GROUP,
    HOUR_MS,
    SCENES,
    World,
    append_to,
    end_session_run,
    of_policy,
    put_away,
    steer_session_run,
)
from tokenbus.bus.scripts import (
    Commit,
    RawPart,
    ScriptCall,
    activity,
    append_raw,
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
from tokenbus.bus.scripts.chain import MOST_LOAD, MOST_PARTS, ChainedStage, chain
from tokenbus.bus.scripts.commit import (
    COMMIT_BYTES,
    COMMIT_VALUES,
    FORGOTTEN_AT_ONCE,
    MOST_EVENT_BYTES,
    MOST_TAKEN_BYTES,
    owe,
)
from tokenbus.bus.scripts.leases import present, withdraw_replay
from tokenbus.bus.scripts.limits import MAX_PLACES
from tokenbus.bus.scripts.runs import away, index, inputs, timeouts, waits
from tokenbus.bus.scripts.script import MAX_VALUES
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.client.sessions.history import AT_ONCE, STEP_BYTES
from tokenbus.events.frames import RunLimits
from tokenbus_services.fetcher.writing.attempt_writer import FRAME_BYTES
from tokenbus_services.parser.away import MOST_BYTES, MOST_TURN_BYTES, PAGE
from tokenbus_services.parser.byte_bounds import FORGOTTEN
from tokenbus_services.settings.tables.limits import LimitSettings

REQUEST = b'{"type":"generate","id":"r","messages":["%b"],"metadata":{"tenant":"t"}}' % (
    b'{\\"a\\":[1,2]},' * (LimitSettings().request_bytes // 14)
)
"""The largest request, full of what a search for its id stops at."""
LARGEST_TEXT = b'"%b"' % (b"x" * LimitSettings().request_bytes)
BLOCK = b"x" * RunLimits().block_chars
CALLS = LimitSettings().runs_per_fetcher
DELIVERIES = 100
NOTICE_BYTES = 32 * 1024
"""A delivery of webhooks: metadata has up to 16 KiB of it."""
ANSWERS = 10_000
"""Open answers of one key of a gateway; what each of them costs is bounded by MAX_VALUES."""
TOPIC_ENTRIES = 50_000

Largest = Callable[[World], Awaitable[ScriptCall]]


async def _add(world: World, key: str, count: int, fields: dict[str, Any]) -> list[str]:
    ids: list[bytes] = []
    for _ in range(0, count, 1000):
        pipe: Any = world.client.pipeline(transaction=False)
        for _ in range(min(1000, count - len(ids))):
            pipe.xadd(key, fields)
        ids += await pipe.execute()
    return [each.decode() for each in ids]


async def _held(world: World, count: int, fields: dict[str, Any]) -> list[str]:
    """Entries of the queue that the consumer `a` holds."""
    ids = await _add(world, world.queue, count, fields)
    await world.client.xreadgroup(GROUP, "a", {world.queue: ">"}, count=count + 10)
    return ids


def _of_held(script: Callable[..., ScriptCall], **more: Any) -> Largest:
    async def call(w: World) -> ScriptCall:
        return script(
            w.queue, group=GROUP, consumer="a", ids=await _held(w, work_queue.MOST_IDS, {"__data__": "{}"}), **more
        )

    return call


def _of_large_entry(script: Callable[..., ScriptCall], **more: Any) -> Largest:
    async def call(w: World) -> ScriptCall:
        [entry] = await _add(w, w.queue, 1, {"__data__": REQUEST})
        return script(w.queue, entry=entry, **more)

    return call


def _request(tenant: int) -> dict[str, Any]:
    return {"__data__": b'{"type":"generate","id":"r","metadata":{"tenant":"t%d"}}' % tenant}


async def _take(w: World) -> ScriptCall:
    pipe: Any = w.client.pipeline(transaction=False)
    for n in range(2 * fair_order.SORTED_ENTRIES):
        pipe.xadd(w.queue, _request(n))
    await pipe.execute()
    await w.client.hset(fair_order.order_keys(w.queue)[1], mapping=dict.fromkeys(map(str, range(100_000)), 0))
    return fair_order.take(w.queue, "requests", group=GROUP, consumer="b", count=fair_order.SORTED_ENTRIES)


async def _take_large(w: World) -> ScriptCall:
    for _ in range(8):
        await _add(w, w.queue, 1, {"__data__": REQUEST})
    return fair_order.take(w.queue, "requests", group=GROUP, consumer="b", count=64)


async def _reclaim(w: World) -> ScriptCall:
    ids = await _held(w, 2 * fair_order.SORTED_ENTRIES, _request(1))
    await w.client.xclaim(w.queue, GROUP, fair_order.NOBODY, 0, ids)
    mine = await _held(w, 64, _request(1))
    await w.client.xclaim(w.queue, GROUP, "a", 0, mine, idle=HOUR_MS)
    return fair_order.reclaim(w.queue, "requests", group=GROUP, consumer="b", idle_ms=60_000, start="-", count=64)


async def _put_back(w: World) -> ScriptCall:
    ids = await _held(w, work_queue.MOST_IDS, _request(1))
    return fair_order.put_back(w.queue, "requests", group=GROUP, consumer="a", ids=ids)


async def _claim(w: World) -> ScriptCall:
    ids = await _held(w, 10_000, {"__data__": "{}"})
    await w.client.xclaim(w.queue, GROUP, "a", 0, ids[-1:], idle=HOUR_MS)
    return work_queue.claim(w.queue, group=GROUP, consumer="b", idle_ms=60_000, start="0-0", count=64)


async def _accept(w: World) -> ScriptCall:
    await _add(w, w.keys.log(w.new), TOPIC_ENTRIES, {"__data__": "{}"})
    call = SCENES["accept"][0].call(w)
    return ScriptCall(call.script, call.keys, [REQUEST if arg == b"begun" else arg for arg in call.args])


async def _append_raw(w: World) -> ScriptCall:
    parts: list[RawPart] = []
    for n in range(64):
        key = w.keys.run(f"{w.run}-{n}")
        await w.client.hset(key, mapping={"status": "open", "attempt": 1, "raw": 0, "record": 2**30})
        await w.client.pexpire(key, HOUR_MS)
        parts.append(RawPart(w.run, key, 1, 0, final=True, data=b"x" * (2 * FRAME_BYTES // 64), writer="w"))
    return append_raw(w.raw, w.normalizer, parts, policy_lease=w.policy)


TOPICS = ("visible", "chunks", "blocks")


async def _commit(w: World) -> ScriptCall:
    commit = Commit(w.policy, w.drafts)
    places = [w.keys.topic(0, name) for name in TOPICS]
    for n in range(COMMIT_VALUES // 8):
        commit.publish(w.keys.log(w.run), f"1-{n}", b"x" * (8 * COMMIT_BYTES // COMMIT_VALUES), places)
    commit.expire(w.keys.log(w.run), HOUR_MS)
    return of_policy(w, commit)


async def _commit_of_a_block(w: World) -> ScriptCall:
    commit = Commit(w.policy, w.drafts)
    commit.publish(w.keys.log(w.run), "1-0", BLOCK, [w.keys.topic(0, name) for name in TOPICS[1:]])
    commit.expire(w.keys.log(w.run), HOUR_MS)
    return of_policy(w, commit)


async def _owe(w: World) -> ScriptCall:
    place = w.keys.owed(0, "policy")
    return owe(w.policy, place, token=w.tokens[w.policy], name="1", part=BLOCK, ttl_ms=HOUR_MS)


async def _rejected(w: World) -> ScriptCall:
    for _ in range(200):
        entry = await w.client.xadd(w.keys.dead, {"__data__": b"x" * 10_000})
        await w.client.rpush(w.keys.rejected, entry)
    lists = (w.keys.dead, w.keys.rejected, w.keys.added("1"))
    return dead_letters.add_rejected(*lists, most=1000, most_rejected=10, keep_ms=HOUR_MS, data=REQUEST)


async def _admit(w: World) -> ScriptCall:
    now = (await w.client.time())[0] * 1000
    for live in (True, False):
        places = {f"run{n} gw{live}": now + (HOUR_MS if live else -1) for n in range(ANSWERS)}
        await w.client.zadd(f"{w.use}:open", places)
    allowed = gate.AdmissionLimits(requests_per_minute=60, tokens_per_minute=1000, concurrency=5000, budget_nano=10_000)
    reserved = gate.Reservation(client="ada", estimate_nano=1000, hold_ms=HOUR_MS, keep_ms=HOUR_MS)
    above = [f"above{n}" for n in range(11)]
    return gate.admit(
        *(w.use, w.spend, w.run, allowed),
        gateway="gw",
        lease_ms=HOUR_MS,
        hold=w.hold,
        reserved=reserved,
        above=above,
    )


async def _count_use(w: World) -> ScriptCall:
    spent = {f"{day}:{what}": 1 for day in range(367) for what in ("cost", "input", "output", "runs")}
    await w.client.hset(w.spend, mapping=spent | {f"price:{n}:cost": 1 for n in range(1000)})
    return SCENES["gateway.count_use"][0].call(w)


async def _renew_open(w: World) -> ScriptCall:
    runs = [f"run{n}" for n in range(gate.MOST_RENEWED)]
    await w.client.zadd(f"{w.use}:open", {f"{run} gw": 2**45 for run in runs})
    return gate.renew_open(w.use, runs, gateway="gw", lease_ms=HOUR_MS)


async def _runs(w: World, status: str, count: int = 500) -> list[str]:
    pipe: Any = w.client.pipeline(transaction=False)
    runs = [f"{w.run}-{n}" for n in range(count)]
    for run in runs:
        pipe.hset(w.keys.run(run), "status", status)
        pipe.pexpire(w.keys.run(run), HOUR_MS)
    await pipe.execute()
    return runs


async def _put_away(w: World) -> ScriptCall:
    """A page of runs, of which the last one is as large as one may be, behind entries that must be looked at."""
    runs = (await _runs(w, "open"))[:PAGE]
    pipe: Any = w.client.pipeline(transaction=False)
    for run in runs:
        pipe.hset(w.keys.run(run), mapping={"attempt": 1, "closed": 1})
    await pipe.execute()
    call = put_away(w, runs, b"s" * (MOST_BYTES // PAGE))
    largest = [*call.args]
    largest[-3] = b"s" * 3 * MOST_TURN_BYTES
    await _add(w, w.events, away.MOST_UNREAD - 1, {"other": BLOCK[: 2**17]})
    return ScriptCall(call.script, call.keys, largest)


async def _bring_back(w: World) -> ScriptCall:
    await w.client.hset(w.keys.run(w.away), "away", b"s" * 3 * MOST_TURN_BYTES)
    return SCENES["away.put_back"][0].call(w)


async def _list_open(w: World) -> ScriptCall:
    tenants = w.keys.open_runs(0, "ada")
    of = [index.OpenRun(w.keys.run(run), run, 1, "p", "m", "ada", tenants) for run in await _runs(w, "open")]
    return index.list_open(w.keys.open_runs(0), of, ttl_ms=HOUR_MS)


async def _unlist_ended(w: World) -> ScriptCall:
    k, runs = w.keys, await _runs(w, "completed")
    places = k.open_runs(0), k.ended_runs(0), k.away(0)
    return index.unlist_ended(*places, [k.run(run) for run in runs], keep_ms=HOUR_MS, runs=runs)


async def _tool_result(w: World) -> ScriptCall:
    of = {"run": w.run, "frame": REQUEST}
    return inputs.tool_result(w.keys.run(w.run), w.events, w.parser, **of, block=0, attempt=1)


async def _change(w: World) -> ScriptCall:
    await w.client.hset(w.keys.meta, mapping={f"seen:worker{n}": 1 for n in range(MAX_VALUES)})
    return layout.change(w.keys.meta, epoch=1, announced="", fields=["spread", 2])


async def _present(w: World) -> ScriptCall:
    members = w.keys.members(GROUP)
    await w.client.zadd(members, {f"worker{n}": 2**45 + n for n in range(2 * MAX_VALUES)})
    return present(members, member="a", ttl_ms=HOUR_MS)


async def _renew(w: World) -> ScriptCall:
    members = [f"call{n}" for n in range(CALLS)]
    await w.client.zadd(w.limited.held, dict.fromkeys(members, 2**50))
    return limits.renew(w.limited.held, lease_ms=HOUR_MS, members=members)


async def _reserve(w: World) -> ScriptCall:
    scopes = [limits.Scope("provider", w.keys.limit(f"provider:{n}"), 10.0, 60_000, 3) for n in range(3)]
    till = (await w.client.time())[0] * 10**6 + 10**10
    for scope in scopes:
        await w.client.hset(scope.key, mapping={f"wait:w{n}": f"{n + 1} {till} 10" for n in range(MAX_PLACES)})
        await w.client.pexpire(scope.key, HOUR_MS)
    return limits.reserve(scopes, member="m1", worker="w", tokens=600, lease_ms=HOUR_MS)


async def _index_record(w: World) -> ScriptCall:
    runs = [f"r{n}" for n in range(2 * MAX_VALUES)]
    await w.client.zadd(w.keys.records, dict.fromkeys(runs, 1))
    await w.client.hset(w.keys.record_entries, mapping=dict.fromkeys(runs, "{}"))
    of = {"run": w.run, "at_ms": 2**42, "entry": b"{}"}
    return records.index_record(w.keys.records, w.keys.record_entries, keep_ms=HOUR_MS, most=9, **of)


async def _deliveries_due(w: World) -> ScriptCall:
    ids = [f"msg_{n}" for n in range(DELIVERIES)]
    await w.client.zadd(w.keys.webhook_due("a"), dict.fromkeys(ids, 1))
    await w.client.hset(w.keys.webhook_bodies("a"), mapping=dict.fromkeys(ids, b"x" * NOTICE_BYTES))
    return webhooks.due(w.keys.webhook_due("a"), w.keys.webhook_bodies("a"), most=DELIVERIES, lease_ms=HOUR_MS)


async def _publish(w: World) -> ScriptCall:
    return requests.publish(w.queue, requests=[TOPIC_ENTRIES, REQUEST, "ada"])


async def _mirror_offset(w: World) -> ScriptCall:
    await w.client.hdel(w.normalizer, "entries")
    await _add(w, w.raw, TOPIC_ENTRIES, {"__data__": "x" * 100})
    return topics.mirror_offset(w.normalizer, w.raw, group=GROUP, offset=w.ends[w.raw], after=w.ends[w.raw])


async def _trimmed(w: World) -> ScriptCall:
    streams = [w.keys.topic(n, "visible") for n in range(topics.STREAMS)]
    for stream in streams:
        await w.client.xadd(stream, {"__data__": b"x" * 2**20})
    return topics.trimmed(streams, cursors=["1-1"] * len(streams))


def _with_waiting(call: Callable[[World], ScriptCall]) -> Largest:
    """As many messages wait as a session lets wait, and together they are as large as they may be."""

    async def largest(w: World) -> ScriptCall:
        _, appends, queue, _ = w.keys.of_session(w.session)
        text = '"' + "x" * (sessions.MOST_WAITING_BYTES // sessions.MOST_WAITING - 64) + '"'
        work = msgspec.msgpack.encode((text, "begun", 0, 0, "", 1, ["provider", "p"]))
        await w.client.delete(appends, queue)
        for n in range(sessions.MOST_WAITING):
            await w.client.hset(appends, mapping={f"w{n}": "{}", f"!w{n}": work, f"^w{n}": 1})
            await w.client.zadd(queue, {f"w{n}": n})
        waiting = len(work) * sessions.MOST_WAITING
        await w.client.hset(w.keys.session(w.session), mapping={"together": 1, "waiting": waiting})
        return call(w)

    return largest


def _of_long_session(kind: str) -> Largest:
    """The largest append, to a session whose log is full."""

    async def largest(w: World) -> ScriptCall:
        for n in range(MOST_EVENT_BYTES // len(LARGEST_TEXT)):
            await run_script(w.server, append_to(w, "add", append=f"before{n}", item=LARGEST_TEXT, work=b"{}"))
        work = msgspec.msgpack.encode((LARGEST_TEXT.decode(), "begun", 0, 0, "", 1, ["provider", "p"]))
        return append_to(w, kind, append="a", item=LARGEST_TEXT, work=work if kind == "message" else LARGEST_TEXT)

    return largest


async def _add_to_a_session(w: World) -> ScriptCall:
    *_, history = w.keys.of_session(w.session)
    half = b'{"role":"user","content":"%b"}' % (b"x" * (MOST_TAKEN_BYTES // 2 - 100))
    await w.client.hset(history, "add:1", b"[%b]" % half)
    return append_to(w, "add", item=half, work=half)


async def _rewrite(w: World) -> ScriptCall:
    """More runs than a rewrite forgets at once, each with a long answer."""
    *_, history = w.keys.of_session(w.session)
    runs = FORGOTTEN_AT_ONCE + 1
    for n in range(runs):
        await w.client.hset(history, mapping={f"in:{n}": b"x" * 2**11, f"out:{n}": b"x" * 2**15})
    await w.client.hset(w.keys.session(w.session), "runs", runs)
    return append_to(w, "rewrite", item=LARGEST_TEXT, work=LARGEST_TEXT, subject=str(runs - 1), runs=runs)


def _read_history(runs: int, size: int) -> Largest:
    async def largest(w: World) -> ScriptCall:
        *_, history = w.keys.of_session(w.session)
        for n in range(runs):
            await w.client.hset(history, mapping={f"in:{n}": b"x" * (size // 2), f"out:{n}": b"x" * (size // 2)})
        return sessions.read_history(history, before=runs, oldest=0, most_runs=AT_ONCE, most_bytes=STEP_BYTES)

    return largest


async def _chain(w: World) -> ScriptCall:
    """A flush with as much as a flush may carry, between commits that are together as large as they may be."""

    def stage(lease: str, stream: str, commit: Commit) -> ChainedStage:
        return ChainedStage(w.tokens[lease], w.ends[stream], w.ends[stream], "", 1, 4, commit, GROUP)

    one, two, n = Commit(w.normalizer, w.raw), Commit(w.parser, w.events), 0
    while one.load + two.load < MOST_LOAD - 0.01:
        data = b"x" * (8 * COMMIT_BYTES // COMMIT_VALUES)
        two.publish(w.keys.log(w.run), f"1-{n}", data, [w.keys.topic(0, name) for name in ("visible", "chunks")])
        if n % 4 == 0:  # it hands on what several runs got together
            one.append(w.events, [f"{w.run}-{n}", data])
        n += 1
    two.expire(w.keys.log(w.run), HOUR_MS)
    assert one.load + two.load <= MOST_LOAD
    pipe: Any = w.client.pipeline(transaction=False)
    parts: list[RawPart] = []
    for n in range(MOST_PARTS):
        pipe.hset(key := w.keys.run(f"{w.run}-{n}"), mapping={"status": "open", "attempt": 1, "raw": 0})
        pipe.pexpire(key, HOUR_MS)
        data = b"x" * (2 * FRAME_BYTES // MOST_PARTS)
        parts.append(RawPart(f"{w.run}-{n}", key, 1, 0, final=False, data=data, writer="w"))
    await pipe.execute()
    flush = {"flush": "f", "ttl_ms": HOUR_MS, "entries_read": True, "topic_entries": TOPIC_ENTRIES}
    return chain(stage(w.normalizer, w.raw, one), stage(w.parser, w.events, two), parts, **flush)


def _with_frame(script: Callable[..., ScriptCall], **more: Any) -> Largest:
    async def call(w: World) -> ScriptCall:
        of = {"run": w.run, "frame": BLOCK}
        return script(w.keys.run(w.run), w.events, w.parser, **of, **more)

    return call


async def _verdicts(w: World) -> ScriptCall:
    places = w.keys.run(w.run), w.events, w.parser, w.policy
    return inputs.append_verdicts(*places, token=w.tokens[w.policy], run=w.run, frame=BLOCK)


async def _dead(w: World) -> ScriptCall:
    await _add(w, w.keys.dead, 1000, {"__data__": b"x" * 10_000})
    return dead_letters.add(w.keys.dead, w.keys.added("1"), most=100, keep_ms=HOUR_MS, data=REQUEST)


async def _ids(w: World) -> ScriptCall:
    """Entries of which many would be read, were they not so large."""
    await _add(w, w.queue, 16, {"__data__": REQUEST})
    return entries.ids(w.queue, after=w.entries[-1], last="+", count=1000)


async def _erase(w: World) -> ScriptCall:
    await _add(w, w.keys.log(w.ended), TOPIC_ENTRIES, {"__data__": "x" * 100})
    return SCENES["retention.erase"][0].call(w)


async def _forget(w: World) -> ScriptCall:
    runs = await _runs(w, "completed", FORGOTTEN)
    for run in runs:
        await _add(w, w.keys.log(run), 1000, {"__data__": "x" * 100})
    return retention.forget(w.keys.ended_runs(0), [w.keys.kept_of(run) for run in runs], runs=runs)


async def _ends(w: World) -> ScriptCall:
    call = await _trimmed(w)
    return topics.ends(call.keys)


async def _decide(w: World) -> ScriptCall:
    places = w.keys.run(w.run), w.events, w.parser, w.keys.decision(w.run, "d1"), [w.keys.waiting(0)]
    await w.client.zadd(w.keys.waiting(0), {f"gone{n}/0": 1 for n in range(ANSWERS)})
    return waits.decide(*places, run=w.run, wait="0.0", frame=BLOCK, fate=BLOCK)


async def _remember(w: World) -> ScriptCall:
    history = w.keys.of_session(w.session)[3]
    of = {"made": w.session_run.made, "name": "out:0", "messages": LARGEST_TEXT}
    return sessions.remember(w.keys.session(w.session), history, **of)


async def _refuse(w: World) -> ScriptCall:
    log, appends, *_ = w.keys.of_session(w.session)
    for n in range(MOST_EVENT_BYTES // len(LARGEST_TEXT)):
        await run_script(w.server, append_to(w, "add", append=f"before{n}", item=LARGEST_TEXT, work=b"{}"))
    places = w.keys.session(w.session), log, appends, w.keys.log(w.session_run.id), w.keys.topic(0, "sessions")
    of = {"append": "bad", "reason": "refused", "problem": b'"%b"' % (b"x" * 4096), "ttl_ms": HOUR_MS}
    return sessions.refuse(*places, open_run=w.session_run.id, topic_entries=50_000, **of)


async def _refund(w: World) -> ScriptCall:
    call = await _reserve(w)
    scopes = [limits.Scope("provider", key, 10.0, 60_000, 3) for key in call.keys[:3]]
    return limits.refund(scopes, member="m0", left=10, taken=[1, 1, 1])


async def _count_activity(w: World) -> ScriptCall:
    counts = {f"field{n}": n for n in range(MAX_VALUES // 2)}
    return activity.count_activity(w.keys.activity(1), counts, {f"level{name}": n for name, n in counts.items()})


async def _acquire(w: World) -> ScriptCall:
    await w.client.xadd(w.events, {w.run: BLOCK})
    return SCENES["leases.acquire"][0].call(w)


async def _renew_lease(w: World) -> ScriptCall:
    await w.client.xadd(w.events, {w.run: BLOCK})
    return SCENES["leases.renew"][0].call(w)


async def _withdraw(w: World) -> ScriptCall:
    notes = [value for n in range(100) for value in (f"note{n}", "1")]
    return withdraw_replay(w.normalizer, token=w.tokens[w.normalizer], count="replays", notes=notes)


async def _policy_starts(w: World) -> ScriptCall:
    names = [f"policy{n}" for n in range(200)]
    return policies.policy_starts(w.keys.run(w.run), w.policy, token=w.tokens[w.policy], policies=names)


LARGEST: dict[str, Largest] = {
    "accept": _accept,
    "activity.count_activity": _count_activity,
    "attempt_fence.append_raw": _append_raw,
    "chain": _chain,
    "commit": _commit,
    "commit, the largest block": _commit_of_a_block,
    "commit.owe": _owe,
    "dead_letters.add": _dead,
    "dead_letters.add_rejected": _rejected,
    "entries.field_sizes": _of_large_entry(entries.field_sizes),
    "entries.find_request": _of_large_entry(entries.find_request),
    "entries.ids": _ids,
    "entries.value": _of_large_entry(entries.value, place=2),
    "fair_order.put_back": _put_back,
    "fair_order.reclaim": _reclaim,
    "fair_order.take": _take,
    "fair_order.take, large requests": _take_large,
    "gateway.admit": _admit,
    "gateway.count_use": _count_use,
    "gateway.renew_open": _renew_open,
    "index.list_open": _list_open,
    "away.put_away": _put_away,
    "away.put_back": _bring_back,
    "index.unlist_ended": _unlist_ended,
    "inputs.append_verdicts": _verdicts,
    "inputs.tool_progress": _with_frame(inputs.tool_progress, block=0, attempt=1),
    "inputs.tool_result": _tool_result,
    "layout.change": _change,
    "leases.acquire": _acquire,
    "leases.present": _present,
    "leases.renew": _renew_lease,
    "leases.withdraw_replay": _withdraw,
    "limits.refund": _refund,
    "limits.renew": _renew,
    "limits.reserve": _reserve,
    "policies.policy_starts": _policy_starts,
    "records.index_record": _index_record,
    "requests.publish": _publish,
    "retention.erase": _erase,
    "retention.forget": _forget,
    "sessions.append, a configuration": _of_long_session("configure"),
    "sessions.append, to the history": _add_to_a_session,
    "sessions.append, a rewritten history": _rewrite,
    "sessions.append, a message": _of_long_session("message"),
    "sessions.read_history": _read_history(AT_ONCE, STEP_BYTES // AT_ONCE),
    "sessions.read_history, one long run": _read_history(2, 2 * MOST_TAKEN_BYTES),
    "sessions.refuse": _refuse,
    "sessions.remember": _remember,
    "timeouts.append_timeout": _with_frame(timeouts.append_timeout),
    "commit, the end of a session's run": _with_waiting(end_session_run),
    "commit, what steers a session's run": _with_waiting(steer_session_run),
    "topics.ends": _ends,
    "topics.mirror_offset": _mirror_offset,
    "topics.trimmed": _trimmed,
    "waits.decide": _decide,
    "webhooks.due": _deliveries_due,
    "work_queue.claim": _claim,
    "work_queue.finish": _of_held(work_queue.finish),
    "work_queue.hand_back": _of_held(work_queue.hand_back),
    "work_queue.heartbeat": _of_held(work_queue.heartbeat),
    "work_queue.requeue": _of_held(work_queue.requeue),
}
"""By the script's name, and what is large."""
SMALL = {
    "accept.cancel",
    "accept.mark_asked",
    "attempt_fence.take_job",
    "gateway.hold",
    "gateway.put_key",
    "gateway.release",
    "inputs.keep_task",
    "layout.begin_added",
    "layout.fence",
    "layout.join",
    "leases.count",
    "leases.note",
    "leases.release",
    "limits.pause",
    "limits.spend",
    "policies.count_start",
    "policies.note",
    "retention.memory",
    "timeouts.expire",
    "timeouts.lose_attempt",
    "timeouts.read_policy_stage",
    "waits.confirm",
    "waits.refuse",
    "work_queue.mark",
    "work_queue.retire",
}
"""Scripts that name each key and each argument, have no loop, and whose arguments are names, numbers and short texts.
"""


async def _scene(world: World, name: str) -> ScriptCall:
    return SCENES[name][0].call(world)


async def largest_call(name: str, world: World) -> ScriptCall:
    return await (LARGEST[name](world) if name in LARGEST else _scene(world, name))
