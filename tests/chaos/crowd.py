"""Live clients of gateways during faults: each receives a whole answer or an error, and none a silent end.

Clients whose protocol can resume continue at another gateway until they have received the whole log of the run.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import msgspec

from tests.chaos.deployment.workers import Worker, Workers
from tests.chaos.record import Visit
from tokenbus_services.mock_provider import Delivery, Reply, Script, Turn

MODEL = "crowd"
"""Seconds for all runs of this crowd."""
TOKEN = "crowd-"
SCRIPT = Script(
    name=MODEL, turns=(Turn(says=Reply(text=" ".join(f"word{n}" for n in range(40))), delivery=Delivery(pace=40)),)
)
SETTINGS = "[gateway]\nkeep_alive_s = 0.5\n"
LONGEST_S = 100.0
"""A client that has received neither an end nor an error after this time hangs."""
_PAUSE_S = 0.2
_URL = re.compile(r"^ready gateway (\S+)", re.MULTILINE)
_ID = re.compile(rb"^id: (\d+)", re.MULTILINE)
_TERMINAL = re.compile(rb'"type":"(completed|incomplete|failed|cancelled)"')
_FOREGROUND: dict[str, tuple[str, bytes, bytes, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", b"[DONE]", b'"error"', {"stream": True}),
    "messages": ("/v1/messages", b"message_stop", b"event: error", {"stream": True, "max_tokens": 900}),
}
"""By protocol: the path, what the last event of a whole answer contains, what the last event of an error contains, and
further fields of the request.
"""
_ENDS = ("response.completed", "response.incomplete", "response.failed", "response.cancelled")


class Crowd:
    """Keeps this many clients active until `close`."""

    def __init__(self, workers: Workers, chance: random.Random, *, clients: int) -> None:
        self._workers = workers
        self._chance = chance
        self._clients = clients
        self._enough = asyncio.Event()
        self._begun = 0
        self.visits: list[Visit] = []
        self._responses_begun: dict[str, str] = {}
        """The run of each background response that a client waits for, by the client's text."""
        self._kinds: dict[str, Callable[[httpx.AsyncClient, str], Coroutine[Any, Any, Visit]]] = {
            "native": self._native,
            "responses": self._responses,
        }

    async def keep_coming(self) -> None:
        """Start clients, one after the other in each slot."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=httpx.Timeout(LONGEST_S), limits=limits) as http:
            await asyncio.gather(*(self._one_after_the_other(http) for _ in range(self._clients)))

    def close(self) -> None:
        """Start no further clients; the active ones receive the rest of their answers."""
        self._enough.set()

    async def _one_after_the_other(self, http: httpx.AsyncClient) -> None:
        while not self._enough.is_set():
            kind = self._chance.choice([*self._kinds, *_FOREGROUND])
            self._begun += 1
            says = f"Please look at {TOKEN}{self._begun}"
            try:
                async with asyncio.timeout(LONGEST_S):
                    visit = self._kinds.get(kind)
                    self.visits.append(await (visit(http, says) if visit else self._foreground(http, kind, says)))
            except TimeoutError:
                self.visits.append(Visit(kind, "hangs", run=self._responses_begun.get(says, "")))
            self._responses_begun.pop(says, None)

    async def _url(self) -> str:
        """The URL of a gateway that is running, or was a moment ago."""
        while True:
            ready = [url for worker in self._workers.well("gateway") if (url := _url_of(worker))]
            if ready:
                return self._chance.choice(ready)
            await asyncio.sleep(_PAUSE_S)

    async def _foreground(self, http: httpx.AsyncClient, kind: str, says: str) -> Visit:
        path, whole, error, more = _FOREGROUND[kind]
        body = {"model": f"anthropic/{MODEL}", "messages": [{"role": "user", "content": says}], **more}
        received = b""
        try:
            async with http.stream("POST", await self._url() + path, json=body) as answer:
                if answer.status_code != 200:
                    return Visit(kind, "an error", what=f"status {answer.status_code}")
                async for data in answer.aiter_raw():
                    received += data
        except httpx.TransportError:
            return Visit(kind, "an error", what="cut")
        last = received.rstrip().rpartition(b"\n\n")[2]
        if whole in last:
            return Visit(kind, "whole")
        return Visit(kind, "an error" if error in received else "silent end", what=repr(last[-200:]))

    async def _native(self, http: httpx.AsyncClient, says: str) -> Visit:
        body = {"model": f"anthropic/{MODEL}", "messages": [{"role": "user", "content": says}]}
        run: str = (await self._begin(http, "/runs", body))["run"]
        seqs: list[int] = []
        last, tries = b"", 0
        while True:
            tries += 1
            after = {"last-event-id": str(seqs[-1])} if seqs else {}
            try:
                async with http.stream("GET", f"{await self._url()}/runs/{run}/events", headers=after) as answer:
                    if answer.status_code == 404:
                        return Visit("native", "an error", run=run, what="the run is unknown")
                    if answer.status_code < 300:
                        rest = b""
                        async for data in answer.aiter_raw():
                            *events, rest = (rest + data).split(b"\n\n")
                            seqs += [int(found[1]) for event in events if (found := _ID.search(event))]
                            last = next((event for event in reversed(events) if b"data: " in event), last)
                        if _TERMINAL.search(last):
                            return Visit("native", "whole" if tries == 1 else "resumed", run=run, seqs=seqs)
                        if b"gateway_error" not in last:
                            return Visit("native", "silent end", run=run, what=repr(last[-200:]))
            except httpx.TransportError:
                pass
            await asyncio.sleep(_PAUSE_S)

    async def _responses(self, http: httpx.AsyncClient, says: str) -> Visit:
        body = {"model": f"anthropic/{MODEL}", "input": says, "background": True}
        name: str = (await self._begin(http, "/v1/responses", body))["id"]
        self._responses_begun[says] = name.removeprefix("resp_")
        numbers: list[int] = []
        last, tries = "", 0
        while True:
            tries += 1
            path = f"/v1/responses/{name}?stream=true" + (f"&starting_after={numbers[-1]}" if numbers else "")
            try:
                async with http.stream("GET", await self._url() + path) as answer:
                    if answer.status_code == 404:
                        return Visit("responses", "an error", what="the response is unknown")
                    if answer.status_code < 300:
                        rest = b""
                        async for data in answer.aiter_raw():
                            *events, rest = (rest + data).split(b"\n\n")
                            for event in events:
                                if b"sequence_number" in event:
                                    decoded = msgspec.json.decode(event.partition(b"data: ")[2])
                                    last = decoded["type"]
                                    if decoded.get("code") == "run_not_found":  # lost with a server, before intake
                                        return Visit("responses", "an error", what="the response is unknown")
                                    if last != "error":  # the error is this gateway's, not the run's
                                        numbers.append(decoded["sequence_number"])
                        if last == "error":
                            await asyncio.sleep(_PAUSE_S)
                            continue
                        if last not in _ENDS or numbers != list(range(numbers[0], numbers[0] + len(numbers))):
                            return Visit("responses", "silent end", what=f"{last} after {numbers[-3:]}")
                        return Visit("responses", "whole" if tries == 1 else "resumed")
            except httpx.TransportError:
                pass
            await asyncio.sleep(_PAUSE_S)

    async def _begin(self, http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Any:
        """Begin a background run, at another gateway if the first is gone or refuses it."""
        while True:
            try:
                answer = await http.post(await self._url() + path, json=body)
                if answer.status_code < 300:
                    return answer.json()
            except httpx.TransportError:
                pass
            await asyncio.sleep(_PAUSE_S)


def _url_of(worker: Worker) -> str | None:
    found = _URL.search(worker.log.read_text(errors="replace"))
    return found[1] if found else None
