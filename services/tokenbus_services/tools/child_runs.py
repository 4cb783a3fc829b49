"""Tools of kind `run`: a call begins a child run, and that run's text is the result of the call.

A run that a client's key pays for has children that this key pays for: each is admitted as a request of the client is.

Each entry of the queue is one look at the child, after which no worker has anything of it: the child is published, or
it is still running, or it has ended and its text is delivered. The commit that ends the child asks for the last look.
All looks come to the same end, however often they are repeated: the child's id follows from the call, and intake
accepts it once, while the call is open.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

import msgspec

from tokenbus.bus.keys import Keys
from tokenbus.bus.run_record import DEADLINE, ENDED, REQUEST, STATUS, UNENDED, call_field, child_field, status_of
from tokenbus.bus.scripts.requests import publish
from tokenbus.bus.server.retry import retry_until_available
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus.client.publishing import encoded
from tokenbus.client.response import Response
from tokenbus.client.sessions.history import response_in_log
from tokenbus.core.request.bounds import tenant_of
from tokenbus.errors import RequestError, ServerError, ToolFailure
from tokenbus.events.error_info import ErrorInfo
from tokenbus.events.frames import ChildEnd, ToolWork
from tokenbus.events.requests import Generate, Message, Tool
from tokenbus_services.gateway.budgets.holds import hold_of
from tokenbus_services.gateway.keys.admission import KeyAdmission
from tokenbus_services.gateway.problem import Refusal
from tokenbus_services.gateway.surfaces.contract import Payer, payer_in
from tokenbus_services.settings import RunTool, Settings

MOST_REQUESTS = 100_000
"""No child run is published while more requests wait."""
N = TypeVar("N", int, float)
T = TypeVar("T")
_request = msgspec.json.Decoder(Generate)


class Found(NamedTuple):
    """The result of a child run that has ended."""

    attempt: int
    """Of the call."""
    text: str
    end: ChildEnd


class ChildCall(NamedTuple):
    """A call that must be published as a run."""

    attempt: int
    parent: Generate
    """The parent's request."""
    deadline_ms: int
    """The parent's; 0: it has none."""


class ChildRuns:
    """Looks at the child runs of calls."""

    def __init__(self, server: Server, settings: Settings) -> None:
        self._server = server
        self._settings = settings
        self._keys = settings.keys
        self._admission = KeyAdmission.of(settings, server)

    async def look(self, work: ToolWork) -> Found | ChildCall | None:
        """What there is to do for the call; None: nothing, because the child runs or nothing waits for it."""
        server, keys, block = self._server, self._within(work), work.block
        fields = [STATUS, call_field(block), child_field(block), REQUEST, DEADLINE]
        status, attempt, begun, request, deadline = await retry_until_available(
            server, lambda: server.client.hmget(keys.run(work.run), fields), what="look-up of a call"
        )
        if status != b"open" or attempt is None or request is None:
            return None
        found = await retry_until_available(
            server, lambda: server.client.hget(keys.run(work.child), STATUS), what="look-up of a child run"
        )
        known = status_of(found)
        if known in UNENDED:
            return None
        if known in ENDED:
            log = keys.log(work.child)
            response = await retry_until_available(
                server, lambda: response_in_log(server, log), what="text of a child run"
            )
            return Found(int(attempt), *_result(response))
        if begun:
            return Found(int(attempt), *_result(None))
        return ChildCall(int(attempt), _request.decode(request), int(deadline or 0)) if work.name else None

    async def publish(
        self, work: ToolWork, call: ChildCall, tool: RunTool, arguments: dict[str, object], traceparent: str | None
    ) -> None:
        """Publish the child run. Raises ToolFailure if its key does not let it begin, or intake would not take it."""
        seconds = [tool.timeout_s, work.timeout_s]
        if call.deadline_ms:
            seconds.append(max(0.001, (call.deadline_ms - self._server.clock.now_ms()) / 1000))
        above = call.parent
        request = Generate(
            id=work.child,
            parent=work.run,
            provider=tool.provider,
            model=tool.model,
            system=tool.instructions or None,
            messages=[Message(role="user", content=_task(arguments))],
            tools=[Tool(name=name) for name in tool.tools],
            max_tokens=_least(tool.max_tokens, above.max_tokens),
            max_tool_depth=tool.max_tool_depth,
            deadline_s=_least(*seconds),
            metadata=work.metadata,
            record=above.record,
            visible=tool.visible and above.visible,
            policies=[*above.policies, *(name for name in tool.policies if name not in above.policies)],
            input_policies=above.input_policies,
            user_id=above.user_id,
            traceparent=traceparent,
            durability="replicated" if work.durable else None,
        )
        payer = payer_in(work.metadata)
        try:
            if payer:
                request = await self._admitted(request, payer)
            data = encoded(request, limit=self._settings.limits.request_bytes)
        except Refusal as e:
            why = f"{e.problem.code}: {e.problem.message}"
            raise ToolFailure(work.name, e.problem.code, f"the child run cannot begin: {why}") from None
        except RequestError as e:
            raise ToolFailure(work.name, "bad_arguments", f"the child run cannot begin: {e.code}: {e}") from None
        script = publish(self._keys.requests, requests=[MOST_REQUESTS, data, tenant_of(work.metadata)])
        script = msgspec.structs.replace(script, durable=work.durable)
        taken = await retry_until_available(
            self._server, lambda: run_script(self._server, script), what="request for a child run"
        )
        if taken[0] is None:
            if payer:
                await self._insist(lambda: self._admission.release(payer.key, hold_of(work.child, payer)))
            raise ToolFailure(work.name, "unavailable", "the child run cannot begin: too many requests wait")

    async def _admitted(self, request: Generate, payer: Payer) -> Generate:
        """The request as its key lets it begin. Raises Refusal."""
        return await self._insist(lambda: self._admission.admit_child(request, payer))

    async def _insist(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Repeat a call of the admission until the server takes it."""

        async def untranslated() -> T:
            try:
                return await attempt()
            except ServerError as e:
                raise e.__cause__ or e from None  # the error of redis-py, which says whether to try again

        return await retry_until_available(self._server, untranslated, what="admission of a child run")

    def _within(self, work: ToolWork) -> Keys:
        """A tree is in one partition."""
        return self._keys.within(self._keys.partition_of(work.run))


def _least(*values: N | None) -> N | None:
    return min((value for value in values if value is not None), default=None)


def _task(arguments: dict[str, object]) -> str:
    """The child's message: the text of the only argument, or all arguments as JSON."""
    (only, *others) = [*arguments.values()] or [None]
    if isinstance(only, str) and only and not others:
        return only
    return msgspec.json.encode(arguments).decode()


def _result(response: Response | None) -> tuple[str, ChildEnd]:
    """The result for the model, and how the run ended. ``response``: None if nothing of the run is left."""
    if response is None or response.status == "open":
        error = ErrorInfo(code="child_lost", kind="internal", message="nothing is left of the child run")
        return f"{error.code}: {error.message}", ChildEnd("lost", error)
    if response.status == "completed":
        return response.text, ChildEnd("completed")
    error = response.error
    why = f"{error.code}: {error.message}" if error else response.reason or "no reason was given"
    text = f"the child run ended {response.status}: {why}"
    if response.text:
        text += f"\n\nUntil then it said:\n{response.text}"
    return text, ChildEnd(response.status, error)
