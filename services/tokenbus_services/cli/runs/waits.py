"""`tokenbus waiting`, `approve`, `deny` and `answer`: what runs wait for, and decisions on it."""

from __future__ import annotations

import getpass
import sys
import time

import msgspec

from tokenbus import Answer, Approval, Client, WaitInfo
from tokenbus.client.publishing import new_run_id
from tokenbus.errors import SettingsError, WaitNotFound
from tokenbus.events.requests import WaitDecision
from tokenbus.events.waits import Verdict, WaitKind
from tokenbus_services.cli import connect as reaching
from tokenbus_services.cli.audit import noted_apart
from tokenbus_services.cli.render import output
from tokenbus_services.cli.render.event_text import shortened
from tokenbus_services.terminal_text import in_one_line

_UNITS = ((86_400, "d"), (3600, "h"), (60, "m"), (1, "s"))
_SHOWN_CHARS = 200


async def listing(run: str | None, *, tenant: str | None, limit: int, as_json: bool) -> None:
    """Show what is waited for."""
    async with reaching.client() as bus:
        found = [info async for info in bus.waiting(run=run, tenant=tenant, limit=limit)]
    now_ms = time.time_ns() // 1_000_000
    for info in found:
        if as_json:
            output.print_json(info)
        else:
            print(output.safe(line(info, now_ms)))
    if not found and not as_json:
        print("nothing is waited for", file=sys.stderr)


def line(info: WaitInfo, now_ms: int) -> str:
    """One wait in one line: run, wait, what for, the call or the question, and the time left."""
    asked = in_one_line(info.text or f"{info.tool_name} {info.arguments or ''}".strip())
    asked = shortened(asked, _SHOWN_CHARS, info.run)
    left_s = max(0, info.deadline_ms - now_ms) // 1000
    return "  ".join((info.run, info.wait, info.what, asked, f"{_time(left_s)} left, then {info.on_deadline}"))


def _time(seconds: int) -> str:
    size, unit = next((each for each in _UNITS if seconds >= each[0]), _UNITS[-1])
    return f"{seconds // size}{unit}"


async def decide(run: str, wait: str | None, decision: Verdict, *, by: str | None, given: str | None) -> None:
    """Decide. ``given``: the edited arguments or the answer as JSON, or the reason. Raises as `Client.decide`."""
    async with reaching.client() as bus:
        what: WaitKind = "approval" if decision in ("allow", "deny") else "answer"
        fate = await bus.decide(_decision(run, wait or await _only(bus, run, what), decision, by or _user(), given))
    await noted_apart("decide", run=run, wait=fate.wait, decision=fate.decision)
    print(output.safe(f"{fate.decision}  {run}  {fate.wait}"))


def _decision(run: str, wait: str, decision: Verdict, by: str | None, given: str | None) -> WaitDecision:
    known = {"type": "approval", "run": run, "wait": wait, "decision": decision, "by": by}
    known |= {"door": "cli", "decision_id": new_run_id()}
    match decision:
        case "allow":
            return msgspec.convert({**known, "arguments": _object("--arguments", given)}, Approval)
        case "deny":
            return msgspec.convert({**known, "reason": given}, Approval)
        case _:
            return msgspec.convert({**known, "type": "answer", "content": _object("--content", given)}, Answer)


def _object(option: str, given: str | None) -> dict[str, object] | None:
    try:
        return None if given is None else msgspec.json.decode(given, type=dict[str, object])
    except msgspec.DecodeError as e:
        raise SettingsError("options", option, f"it is no JSON object: {e}") from None


async def _only(bus: Client, run: str, what: WaitKind) -> str:
    """The one wait of this kind that the run has. Raises WaitNotFound, and SettingsError if there are several."""
    found = [info async for info in bus.waiting(run=run) if info.what == what]
    if not found:
        raise WaitNotFound(run, f"an {what}")
    if len(found) > 1:
        names = ", ".join(info.wait for info in found)
        raise SettingsError("options", "WAIT", f"name one: the run waits for {names}")
    return found[0].wait


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return None
