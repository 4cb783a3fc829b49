"""A session in the model: appends as intake makes them, of the session as it was then; and what must hold of its log.

The calls are intake's own. One may be sent much later, or twice, and when it is refused because the session has changed
it is made again, as intake does.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import count

import msgspec

from tests.model.actors import Wire
from tests.model.oracle import EventFields, log_of
from tests.model.story import TOOL
from tokenbus.bus.keys import Keys
from tokenbus.bus.scripts import ScriptCall
from tokenbus.bus.scripts.sessions import MOVED
from tokenbus.bus.server.server import Server
from tokenbus.bus.work_queue import QueueItem
from tokenbus.events.frames import PolicyPlan
from tokenbus.events.requests import (
    Append,
    Configure,
    Generate,
    Interrupt,
    Message,
    SessionItem,
    SessionMessage,
    WhenBusy,
    Withdraw,
)
from tokenbus.events.sessions import SessionRun, session_ref
from tokenbus_services.intake.input_policies import InputPolicies
from tokenbus_services.intake.run_creation import RunCreation
from tokenbus_services.intake.sessions import SessionAppends
from tokenbus_services.settings import ProviderSettings, RetrySettings, Settings

NAME = "talk"
REF = session_ref("", NAME)
REQUEST = {"provider": "p", "model": "m", "tools": [{"name": TOOL}], "on_failure": "restart"}


class Writer:
    """Intake's part in appends."""

    def __init__(self, url: str, keys: Keys) -> None:
        self._runner = asyncio.Runner()
        self._server = Server(url)
        settings = Settings(
            redis_url=url,
            prefix=keys.prefix,
            partitions=keys.partitions,
            providers={"p": ProviderSettings(api="openai-chat", base_url="http://provider.test")},
            retry=RetrySettings(max_attempts=1000, max_losses=1000),
        )
        creation = RunCreation(settings, self._server)
        self._appends = SessionAppends(
            self._server,
            settings,
            creation,
            _as_it_is,
            offload=_unchanged,
            keep=_nothing,
            judge=InputPolicies(self._server, keys, creation),
            input_plan=lambda request: None,
        )
        self._runner.run(self._server.clock.measure())

    def call(self, append: Append) -> ScriptCall:
        """The call of this append to the session as it is now."""
        return self._runner.run(self._appends.call(append, QueueItem("", "", {}, 1)))

    def close(self) -> None:
        """Disconnect."""
        self._runner.run(self._server.client.aclose())
        self._runner.close()


async def _as_it_is(request: Generate) -> tuple[Generate, PolicyPlan | None, list[str]]:
    return request, None, []


async def _unchanged(request: Generate) -> Generate:
    return request


async def _nothing(messages: Sequence[Message]) -> None:
    pass


class Conversation:
    """One session, and each append that was made for it."""

    def __init__(self, wire: Wire, keys: Keys, writer: Writer) -> None:
        self.held: list[tuple[Append, ScriptCall]] = []
        """Calls that are not answered."""
        self._wire = wire
        self._keys = keys
        self._writer = writer
        self._numbers = count()
        self._accepted: set[str] = set()
        self._checked = -1
        self.make(Configure(request=REQUEST))
        self.send(0, reply_lost=False)

    def make(self, item: SessionItem) -> None:
        """Make the call of an append; it waits in `held`."""
        append = Append(session=NAME, item=item, id=f"append-{next(self._numbers)}")
        self.held.append((append, self._writer.call(append)))

    def say(self, when_busy: WhenBusy) -> None:
        """Make the call of a message."""
        self.make(SessionMessage(content=f"{when_busy} {len(self._accepted)}", when_busy=when_busy))

    def add(self) -> None:
        """Make the call of a message that starts no run."""
        self.make(SessionMessage(content=f"added {len(self._accepted)}", run=False))

    def change(self, together: bool) -> None:
        """Make the call of another configuration."""
        self.make(Configure(request=REQUEST, together=together))

    def interrupt(self, heard_through: int | None) -> None:
        """Make the call of an interrupt."""
        self.make(Interrupt(heard_through=heard_through))

    def withdraw(self, which: int) -> None:
        """Make the call that takes an earlier append back."""
        known = sorted(self._accepted)
        self.make(Withdraw(append=known[which % len(known)]))

    def send(self, which: int, *, reply_lost: bool) -> None:
        """Send one of the calls that are held, however old it is, until it is answered with more than `MOVED`."""
        at = which % len(self.held)
        append, call = self.held[at]
        assert append.id
        while (reply := self._wire.run(call)) == MOVED:
            assert append.id not in self._accepted, "what was accepted is known"
            call = self._writer.call(append)
        assert (reply == b"ok") == (append.id not in self._accepted), "an append is accepted once"
        self._accepted.add(append.id)
        if reply_lost:
            self.held[at] = (append, call)
        else:
            self.held.pop(at)

    @property
    def runs(self) -> list[str]:
        """The ids of all runs so far."""
        made, runs = self._wire.redis.hmget(self._keys.session(REF), "made", "runs")
        return [SessionRun(REF, made.decode(), number).id for number in range(int(runs or 0))]

    @property
    def open_run(self) -> str:
        """The id of the open run, or nothing."""
        return (self._wire.redis.hget(self._keys.session(REF), "run") or b"").decode()

    @property
    def waiting(self) -> int:
        """How many messages wait."""
        return self._wire.redis.zcard(self._keys.of_session(REF)[2])

    def check(self) -> None:
        """Each append is told once and has at most one fate; runs follow one another; all places are the reader's."""
        log = log_of(self._wire.redis, self._keys, REF)
        if len(log) == self._checked:
            return
        self._checked = len(log)
        assert [event["session_seq"] for event in log] == list(range(len(log))), "session_seq has a gap or a double"
        told = [event["append"] for event in log if event["type"] in ("configured", "appended")]
        assert Counter(told) == Counter(self._accepted), "each accepted append is told once"
        fates: dict[str, EventFields] = {}
        open_run, ended, seen = "", -1, set[str]()
        for event in log:
            match event["type"]:
                case "configured":
                    fates[event["append"]] = {"state": "delivered"}
                case "appended":
                    seen.add(event["append"])
                case "delivered" | "returned":
                    assert event["append"] in seen, "a fate comes after its append"
                    assert event["append"] not in fates, "an append has one fate"
                    fates[event["append"]] = event
                    run = event.get("run", "")
                    if event["type"] == "delivered" and run and run != open_run and event["run_seq"] == -1:
                        assert not open_run, "one run is open at a time"
                        assert run == self.runs[ended + 1], "runs follow one another"
                        open_run = run
                case _:
                    assert event["run"] == open_run, "the run that ends is the open one"
                    assert event["run_seq"] == len(log_of(self._wire.redis, self._keys, open_run)) - 1
                    open_run, ended = "", ended + 1
        assert open_run == self.open_run
        stored = self._wire.redis.hgetall(self._keys.of_session(REF)[1])
        known = {name.decode(): msgspec.json.decode(value) for name, value in stored.items() if name[:1] not in b"!^"}
        assert {name: fate["state"] for name, fate in known.items()} == {
            name: fates[name].get("type", "delivered") if name in fates else "appended" for name in self._accepted
        }

    def check_history(self) -> None:
        """At the end nothing waits, and the history has each message once, in the run that it was delivered to."""
        log = log_of(self._wire.redis, self._keys, REF)
        fates = {event["append"]: event for event in log if event["type"] in ("delivered", "returned")}
        said = [event for event in log if event["type"] == "appended"]
        assert {event["append"] for event in said} == set(fates), "every append has a fate"
        assert self.waiting == 0
        assert self._wire.redis.hget(self._keys.session(REF), "waiting") in (b"0", None)
        expected: defaultdict[str, list[str]] = defaultdict(list)
        items = {event["append"]: event["item"] for event in said}
        begun = 0
        for event in log:
            item = items.get(event.get("append", ""), {})
            if event["type"] != "delivered" or "content" not in item:
                continue
            if not item.get("run", True):
                expected[f"add:{begun}"].append(item["content"])
                continue
            at = self.runs.index(event["run"])
            begun = at + 1
            kind = "in" if event.get("turn", 0) == 0 else "steer"
            expected[f"{kind}:{at}"].append(item["content"])
        found: dict[str, list[str]] = {}
        for name, piece in self._wire.redis.hgetall(self._keys.of_session(REF)[3]).items():
            if name.startswith((b"in:", b"steer:", b"add:")):
                messages = msgspec.json.decode(piece)
                parts = [[m] if isinstance(m, dict) else m[1] for m in messages]
                found[name.decode()] = [message["content"] for part in parts for message in part]
        assert found == expected
