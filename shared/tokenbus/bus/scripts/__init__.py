"""Lua scripts of the bus, each with its contract of KEYS and ARGV as a Python signature.

Rules for all scripts:

- Every check comes before the first write, and nothing after the first write can fail, because a script that fails
  midway keeps what it wrote (https://redis.io/docs/latest/develop/programmability/eval-intro/).
- All keys of a call are in one slot.
- Time is the server's (`TIME`), so that no worker's clock decides ownership.
- A script may be sent again after a lost reply (a tool's progress is then published twice).

The counters ``arrived`` and ``done`` in a lease hash are bytes of frames written to and consumed from the group's
input. Their difference is the lag that drives backpressure.
"""

from tokenbus.bus.scripts.commit import Commit, owe
from tokenbus.bus.scripts.leases import acquire, count, note, present, release, renew, withdraw_replay
from tokenbus.bus.scripts.runs.accept import accept, cancel
from tokenbus.bus.scripts.runs.attempt_fence import RawPart, append_raw, take_job
from tokenbus.bus.scripts.runs.inputs import append_verdicts, keep_task, tool_progress, tool_result
from tokenbus.bus.scripts.runs.waits import decision
from tokenbus.bus.scripts.script import Arg, LuaScript, ScriptCall, joined
from tokenbus.bus.scripts.work_queue import BEGUN, claim, finish, hand_back, heartbeat, mark, pages, requeue, retire

__all__ = [
    "BEGUN",
    "Arg",
    "Commit",
    "LuaScript",
    "RawPart",
    "ScriptCall",
    "accept",
    "acquire",
    "append_raw",
    "append_verdicts",
    "cancel",
    "claim",
    "count",
    "decision",
    "finish",
    "hand_back",
    "heartbeat",
    "joined",
    "keep_task",
    "mark",
    "note",
    "owe",
    "pages",
    "present",
    "release",
    "renew",
    "requeue",
    "retire",
    "take_job",
    "tool_progress",
    "tool_result",
    "withdraw_replay",
]
