"""A background task of a gateway that only fails does no work: it ends, and the gateway with it."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import msgspec
import pytest
from starlette.websockets import WebSocketDisconnect

from tests.waiting import eventually
from tokenbus.bus.keys import Keys
from tokenbus.bus.liveness import MAX_DEFECTS, Liveness, LongTask, stop_task
from tokenbus.bus.scripts.script import ScriptCall
from tokenbus.bus.server.run_scripts import run_script
from tokenbus.bus.server.server import Server
from tokenbus.errors import ServerUnavailable
from tokenbus_services.gateway.budgets import counter
from tokenbus_services.gateway.budgets.counter import SpendCounter
from tokenbus_services.gateway.keys import access, admission
from tokenbus_services.gateway.keys.access import KeyAccess
from tokenbus_services.gateway.routes.sockets import handshake
from tokenbus_services.gateway.routes.sockets.response_socket import ResponseSocket
from tokenbus_services.settings import Settings
from tokenbus_services.settings.tables.gateway import KeyRules


async def test_a_count_of_spend_that_always_fails_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counter, "RETRY_S", 0.0)
    tries: list[int] = []

    class Broken:
        def subscribe(self, *_: Any, **__: Any) -> Any:
            tries.append(1)
            raise RuntimeError("a defect")

    counting = SpendCounter(
        cast("Any", None),
        cast("Any", Broken()),
        cast("Any", None),
        prices=cast("Any", None),
        apis={},
        rules_of=cast("Any", None),
        keep_ms=1,
    )
    with pytest.raises(RuntimeError, match="a defect"):
        await asyncio.wait_for(counting.run(), timeout=20)
    assert len(tries) == MAX_DEFECTS


async def test_a_renewal_of_places_that_always_fails_ends(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "RENEW_S", 0.0)

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a defect")

    monkeypatch.setattr(access, "renew_open", broken)
    nothing: Any = None
    keyed = KeyAccess(Settings(), server, admission=nothing, rules=nothing)
    keyed._open["ada"] = {"run": 1}
    liveness, ended = Liveness(), list[LongTask]()
    liveness.ended = ended.append
    await keyed.open(liveness)
    await eventually(lambda: bool(ended))
    assert isinstance(ended[0].task.exception(), RuntimeError)


async def test_a_place_whose_admission_lost_its_reply_is_free_again(
    server: Server, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "RENEW_S", 0.01)

    async def loses_its_reply(server: Server, call: ScriptCall) -> Any:
        await run_script(server, call)
        raise ServerUnavailable(server.url.safe, "the connection was lost")

    monkeypatch.setattr(admission, "run_script", loses_its_reply)
    nothing: Any = None
    settings = Settings(prefix=keys.prefix)
    keyed = KeyAccess(settings, server, admission=admission.KeyAdmission.of(settings, server), rules=nothing)
    places = f"{settings.keys.gateway_use('ada')}:open"
    with pytest.raises(ServerUnavailable):
        await keyed._admitted("ada", "r1", KeyRules(max_parallel_requests=1), 0, hold="r1", hold_s=60)
    assert await server.client.zcard(places) == 1
    liveness = Liveness()
    await keyed.open(liveness)

    async def free() -> bool:
        return not await server.client.zcard(places)

    await eventually(free)
    await keyed.close()


async def test_a_defect_of_an_answer_over_a_socket_is_told_and_not_taken_for_a_client_that_left() -> None:
    """Starlette reports a closed socket by a RuntimeError, and so does Python many a defect."""

    class Socket:
        headers: ClassVar[dict[str, str]] = {}
        sent: ClassVar[list[dict[str, Any]]] = []

        async def send_text(self, text: str) -> None:
            self.sent.append(msgspec.json.decode(text))

    async def known(headers: object) -> Any:
        return SimpleNamespace(may_use=lambda surface: None)

    gateway = SimpleNamespace(
        settings=SimpleNamespace(send_timeout_s=30.0),
        access=SimpleNamespace(identify=known),
        frame_audit=lambda *_, **__: nullcontext(SimpleNamespace(status=200, caller=None)),
    )
    socket = Socket()
    serving: Any = ResponseSocket(
        cast("Any", gateway), cast("Any", SimpleNamespace(name="s")), cast("Any", None), cast("Any", socket)
    )

    async def broken(*_: Any) -> None:
        raise RuntimeError("dictionary changed size during iteration")

    async def caller() -> Any:
        return None

    serving._publish, serving._caller = broken, caller
    serving._waiting.put_nowait((b"{}", SimpleNamespace(release=lambda: None)))
    answering = asyncio.create_task(serving._answer_all())
    await eventually(lambda: bool(socket.sent) or answering.done())
    assert [frame["status"] for frame in socket.sent] == [500]
    assert not answering.done()
    await stop_task(answering)


async def test_a_socket_that_is_closed_is_a_client_that_left() -> None:
    class Closed:
        async def send_text(self, text: str) -> None:
            raise RuntimeError('Cannot call "send" once a close message has been sent.')

    with pytest.raises(WebSocketDisconnect):
        await handshake.send_text(cast("Any", Closed()), b"{}")
