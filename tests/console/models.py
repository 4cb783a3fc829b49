"""What the models of the page's tests say, and the runs that ask them."""

from __future__ import annotations

from uuid import uuid4

from tests.console.gates import HELD
from tokenbus.testing import Delivery, ErrorEvent, Exchange, LocalBus, Picture, Reply, Stall, Status, ToolCall, Turn

SETTINGS = """
[gateway]
models = ["anthropic/speaks"]
currency = "EUR"
[gateway.prices."anthropic/speaks"]
input = 3.0
output = 15.0
[console]
roles_without_keys = ["see_runs", "see_content", "act", "decide", "admin"]
[tools.weather]
kind = "python"
call = "tokenbus_services.weather:weather"
[tools.gate]
kind = "python"
call = "tests.console.gates:wait"
[tools.pay]
kind = "python"
call = "tests.services.tools.sample_tools:echo"
description = "Pays."
parameters = { type = "object", properties = { amount = { type = "integer" }, to = { type = "string" } } }
approval = "always"
[tools.hurry]
kind = "python"
call = "tests.services.tools.sample_tools:echo"
description = "Pays soon or never."
parameters = { type = "object" }
approval = "always"
approval_timeout_s = 3600
[tools.show]
kind = "client"
description = "Shows something on the client's screen."
parameters = { type = "object" }
timeout_s = 7200
[policies.discretion]
use = "tests.console.gates:hold"
[[policy_routes]]
policies = ["discretion"]
models = ["acts", "minds"]
[limits.providers.gemini.models."acts*"]
concurrency = 1
"""
WORDS = " ".join(f"word{n}" for n in range(60))
HOSTILE = (
    "<script>document.title='hit'</script><img src=x onerror=\"document.title='hit'\"> \x1b[31mred\x1b[0m "
    "\u202egnihton\u202c \u2066x\u2069 \u200b| " + "A" * 1_000_000
)
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
GATE = {"name": "gate", "parameters": {"type": "object", "properties": {"gate": {"type": "string"}}}}


def tool_call(gate: str) -> ToolCall:
    """A call that returns once this gate is open."""
    return ToolCall(name="gate", arguments={"gate": gate})


ACTS = (
    Turn(says=Reply(text="I ask.", tool_calls=(tool_call("acts-0"),)), fault=Stall()),
    Turn(
        says=Reply(thinking="well well", text="So.", tool_calls=(tool_call("acts-1"),)), fault=Stall(after_text="well")
    ),
    Turn(says=Reply(text="as I said", tool_calls=(tool_call("acts-2"),)), fault=Stall(after_text="said")),
    Turn(says=Reply(text=f"{HELD}acts-3", tool_calls=(tool_call("acts-2"),))),
    Turn(says=Reply(text="never"), fault=Status(status=429, headers={"retry-after": "29"})),
)
"""Of one run, each state in a turn of its own."""
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
    "1f15c4890000000d49444154789c63606060f80f0001040100"
    "5fe5c34b0000000049454e44ae426082"
)


def script(bus: LocalBus) -> None:
    bus.model_says("speaks", Turn(says=Reply(thinking="let me see", text=WORDS), delivery=Delivery(pace=60)))
    bus.model_says("waits", Turn(says=Reply(text="one two three four"), fault=Stall(after_text="three")))
    bus.model_says("recovers", Turn(says=Reply(text="at last"), first=(Status(status=529),)))
    bus.model_says("refuses", Turn(says=Reply(text="now it works"), first=(Status(status=400),)))
    bus.model_says("breaks", Turn(says=Reply(text="never mind"), fault=ErrorEvent(after_text="never")))
    bus.model_says("stumbles", Turn(says=Reply(text="one two three"), first=(ErrorEvent(after_text="two"),)))
    bus.model_says("hostile", Reply(thinking="\u2066\x9bhm", text=HOSTILE))
    weather = Reply(text="I look.", tool_calls=(ToolCall(name="weather", arguments={"city": "Zürich"}),))
    bus.model_says("calls", weather, Reply(text="It rains."))
    wrong = Reply(text="I look.", tool_calls=(ToolCall(name="weather", arguments={"town": 1}),))
    bus.model_says("miscalls", wrong, Reply(text="I do not know."))
    bus.model_says("talks", Turn(says=Reply(text=f"{WORDS} " * 50), delivery=Delivery(pace=20)))
    bus.model_says("pays", Reply(tool_calls=(ToolCall(name="pay", arguments={"amount": 500}),)), "Paid.")
    bus.model_says("hurries", Reply(tool_calls=(ToolCall(name="hurry", arguments={"amount": 9}),)), "Paid.")
    bus.model_says("shows", Reply(tool_calls=(ToolCall(name="show", arguments={}),)), "Shown.")
    hostile = ToolCall(name="pay", arguments={"amount": 2**60, "to": HOSTILE[:2000]})
    bus.model_says("pays a stranger", Reply(tool_calls=(hostile,)), "Paid.")
    bus.model_says("minds", Reply(text=f"{HELD}at-once"))
    bus.model_says("acts", *ACTS)
    bus.model_says("acts-too", Turn(says=Reply(text="one"), fault=Stall()))
    bus.model_says("paints", Turn(says=Reply(pictures=(Picture(data=PNG, previews=(PNG,)),))))


def publish(bus: LocalBus, model: str, text: str = "", **fields: object) -> str:
    """Start a run. The provider counts tries by conversation, so each run has one of its own."""
    with bus.sync_client() as client:
        return client.publish({**bus.request(model, text or uuid4().hex), **fields}).id


def call_with(bus: LocalBus, text: str) -> Exchange:
    """The only call whose conversation has this text; calls of other tests may be open beside it."""
    [exchange] = [one for one in bus.exchanges if text.encode() in one.http_request.body]
    return exchange


def ended(bus: LocalBus, model: str, **fields: object) -> str:
    with bus.sync_client() as client:
        run = client.publish({**bus.request(model, uuid4().hex), **fields})
        for _ in client.follow(run):
            pass
        return run.id
