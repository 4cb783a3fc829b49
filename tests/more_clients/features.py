"""What every client is asked to do, and how it is seen that it did: the rows and columns of the table of clients."""

from __future__ import annotations

import asyncio
import base64
import gc
import importlib.util
import inspect
import struct
import time
import zlib
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import aclosing, closing
from typing import Any, ClassVar

from pydantic import BaseModel

from tests.waiting import eventually_sync
from tokenbus.testing import CutOff, LocalBus, Reply, Stall, Status, ToolCall, Turn
from tokenbus_services.mock_provider import ModelRequest

APIS = ("anthropic", "openai-chat", "openai-responses", "gemini", "gemini-interactions")
"""Of the providers behind the gateway."""
MODELS = ("text", "stream", "turn", "sees", "reads", "tool", "record", "cut", "stalled", "failing")
TEXT = "Yes, take it along. It may rain."
HELLO, AND_NOW, LOOK, READ = "Hello.", "And tomorrow?", "What is in it?", "What does it say?"
WHY = "the model broke its leg"
RAIN = "rain in Bonn"
CALL = ToolCall(name="get_weather", arguments={"city": "Bonn"})
SHELLS = {
    **dict.fromkeys(("Bash", "bash", "run_shell_command", "shell_command"), "command"),
    "exec_command": "cmd",
}
"""Of agents for the command line: the argument with the command."""
RECORD = {"city": "Bonn", "rain": True}
SETTINGS = """
[gateway]
drop_unsupported = ["tools.type"]
[gateway.aliases]
default = ["anthropic/text"]
[retry]
max_attempts = 1
"""


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    rain: bool


def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: The city.
    """
    return f"rain in {city}"


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


_ROWS = b"".join(b"\0" + bytes((x * y * 37 + 251) % 256 for x in range(48)) for y in range(1, 17))
PNG = (
    b"\x89PNG\r\n\x1a\n"
    + _chunk(b"IHDR", struct.pack(">IIBBBBB", 16, 16, 8, 2, 0, 0, 0))
    + _chunk(b"IDAT", zlib.compress(_ROWS, 0))
    + _chunk(b"IEND", b"")
)
"""A real picture, whose base64 has the characters in which the two alphabets differ."""
PDF = (
    b"%PDF-1.4\n%\xff\xfb\xef\xbe\n1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj\n"
    b"2 0 obj<</Type/Pages/Kids[3 0 R]/Count 1>>endobj\n3 0 obj<</Type/Page/Parent 2 0 R/MediaBox[0 0 9 9]>>endobj\n"
    b"trailer<</Size 4/Root 1 0 R>>\n%%EOF\n"
)


def coded(data: bytes) -> str:
    return base64.b64encode(data).decode()


class Client:
    """One client at its defaults. A method that it lacks is None. Methods may be coroutines."""

    name: ClassVar[str]
    needs: ClassVar[str]
    """The package that it is in."""

    def __init__(self, gateway: str) -> None:
        raise NotImplementedError

    @classmethod
    def is_here(cls) -> bool:
        """Whether its package is installed."""
        try:
            return importlib.util.find_spec(cls.needs) is not None
        except ModuleNotFoundError:
            return False

    ask: Any
    """``ask(model, said)``: the answer to a text, or to a tuple of files and texts."""
    stream: Any
    """Yields the pieces of an answer to `HELLO`."""
    tool: Any = None
    """Has `get_weather` run, and returns the text after it."""
    turn: Any = None
    """Says `HELLO`, and `AND_NOW` after the answer."""
    record: Any = None
    """Returns the fields of a `Weather`."""
    files: ClassVar[tuple[bytes, ...]] = (PNG, PDF)
    """Those that it can send."""
    leaves: ClassVar[bool] = True
    """Whether its run ends when it stops reading."""
    told: ClassVar[str] = WHY
    """What its error says if the provider fails."""
    fails: ClassVar[dict[str, str]] = {}
    """Features that fail by a defect of its own, with every API: why."""


# --- the models -------------------------------------------------------------------------------------------------------


def _tools(body: Any) -> dict[str, Any]:
    """The schemas of the tools in a request of any API, by name."""
    found = [tool.get("function", tool) for tool in body.get("tools", ())]
    found = [one for tool in found for one in tool.get("functionDeclarations", [tool])]
    schemas = ("parameters", "input_schema", "parametersJsonSchema")
    return {tool["name"]: next((tool[s] for s in schemas if s in tool), {}) for tool in found if "name" in tool}


def _shell(body: Any) -> ToolCall | None:
    """A call of the shell of an agent for the command line."""
    for name, argument in SHELLS.items():
        if schema := _tools(body).get(name):
            fields = schema["properties"]
            needed = {each: fields[each].get("type") != "boolean" and "say it" for each in schema.get("required", ())}
            return ToolCall(name=name, arguments={**needed, argument: f"echo {RAIN}"})
    return None


def calls(request: ModelRequest) -> Reply:
    """Calls the tool, then says what it returned, as agents want it that end with a tool."""
    if RAIN not in str(request.body):
        return Reply(thinking="Hm.", tool_calls=(_shell(request.body) or CALL,))
    if "final_answer" in _tools(request.body):
        return Reply(tool_calls=(ToolCall(name="final_answer", arguments={"answer": f"So: {RAIN}"}),))
    return Reply(text=f"So: {RAIN}")


def record(request: ModelRequest) -> Reply:
    """Fills in the schema: as arguments of the only tool, else as JSON."""
    if names := [*_tools(request.body)]:
        return Reply(tool_calls=(ToolCall(name=names[0], arguments=RECORD),))
    return Reply(text='{"city": "Bonn", "rain": true}')


def script(bus: LocalBus) -> None:
    answer = Reply(thinking="Hm.", text=TEXT)
    for name in ("text", "turn", "sees", "reads"):
        bus.model_says(name, answer)
    bus.model_says("stream", Turn(says=answer, fault=Stall(after_text="along")))
    bus.model_says("tool", calls)
    bus.model_says("record", record)
    bus.model_says("cut", Turn(says=answer, fault=CutOff(after_text="along")))
    bus.model_says("stalled", Turn(says=answer, fault=Stall(after_text="along")))
    bus.model_says("failing", failing)


def failing(request: ModelRequest) -> Turn:
    """An error of its API, with words of its own."""
    body = (
        f'{{"type": "error", "error": {{"type": "invalid_request_error", "message": "{WHY}"}}}}'
        if request.api == "anthropic"
        else f'{{"error": {{"code": 400, "status": "INVALID_ARGUMENT", "message": "{WHY}"}}}}'
    )
    return Turn(says=Reply(), fault=Status(status=400, body=body.encode()))


# --- the features -----------------------------------------------------------------------------------------------------


def done(answer: Any) -> Any:
    """The answer of a method, which may be a coroutine."""
    return asyncio.run(answer) if inspect.iscoroutine(answer) else answer


def pieces(
    stream: Generator[str] | AsyncGenerator[str], most: int = 1_000, then: Callable[[], object] = lambda: None
) -> list[str]:
    """The first pieces of a stream, which is closed then. Empty ones do not count. ``then``: called after the first."""
    found: list[str] = []

    def is_last(piece: str) -> bool:
        if piece:
            found.append(piece)
            if len(found) == 1:
                then()
        return len(found) == most

    async def read(stream: AsyncGenerator[str]) -> None:
        async with aclosing(stream):
            async for piece in stream:
                if is_last(piece):
                    break

    if inspect.isasyncgen(stream):
        asyncio.run(read(stream))
        return found
    assert isinstance(stream, Iterator)
    with closing(stream):  # type: ignore[type-var]
        for piece in stream:
            if is_last(piece):
                break
    return found


class Asked:
    """What the provider was asked by one client, and how it ended."""

    def __init__(self, bus: LocalBus, api: str) -> None:
        self._bus = bus
        self._api = api
        self._since = time.monotonic()

    def of(self, model: str) -> list[Any]:
        return [
            one
            for one in self._bus.exchanges
            if one.received_at >= self._since
            and one.request
            and (one.request.model, one.request.api) == (model, self._api)
        ]

    def resume(self, model: str) -> None:
        """Let the provider go on that has stalled."""
        self._bus.resume(self.of(model)[-1])

    def bodies(self, model: str) -> list[str]:
        return [one.http_request.body.decode() for one in self.of(model)]


def _has_turns(bodies: list[str]) -> None:
    assert any(all(said in body for said in (HELLO, TEXT, AND_NOW)) for body in bodies), bodies


def _has_file(bodies: list[str], file: bytes) -> None:
    assert any(coded(file) in body for body in bodies), bodies


def _says(error: BaseException | None, words: str) -> bool:
    while error is not None:
        if words in f"{error!r} {error}" or words in str(getattr(error, "body", "")):
            return True
        error = error.__cause__ or error.__context__
    return False


def raised(doing: Callable[[], object]) -> BaseException:
    try:
        found = doing()
    except BaseException as e:
        if isinstance(e, KeyboardInterrupt):
            raise
        return e
    raise AssertionError(f"no error, but {found!r}")


def check_text(client: Client, name: Callable[[str], str], asked: Asked) -> None:
    assert done(client.ask(name("text"), HELLO)) == TEXT


def check_stream(client: Client, name: Callable[[str], str], asked: Asked) -> None:
    found = pieces(client.stream(name("stream")), then=lambda: asked.resume("stream"))
    assert "".join(found) == TEXT


def check_tool(client: Client, name: Callable[[str], str], asked: Asked) -> None:
    assert done(client.tool(name("tool"))) == f"So: {RAIN}"


def check_turn(client: Client, name: Callable[[str], str], asked: Asked) -> None:
    assert done(client.turn(name("turn"))) == TEXT
    _has_turns(asked.bodies("turn"))


def check_image(client: Client, name: Callable[[str], str], asked: Asked) -> None:
    assert done(client.ask(name("sees"), (PNG, LOOK))) == TEXT
    _has_file(asked.bodies("sees"), PNG)


def check_document(client: Client, name: Callable[[str], str], asked: Asked) -> None:
    assert done(client.ask(name("reads"), (PDF, READ))) == TEXT
    _has_file(asked.bodies("reads"), PDF)


def check_record(client: Client, name: Callable[[str], str], asked: Asked) -> None:
    assert done(client.record(name("record"))) == RECORD


def check_error(client: Client, name: Callable[[str], str], asked: Asked) -> None:
    error = raised(lambda: done(client.ask(name("failing"), HELLO)))
    assert _says(error, client.told), repr(error)


def check_cut(client: Client, name: Callable[[str], str], asked: Asked) -> None:
    error = raised(lambda: pieces(client.stream(name("cut"))))
    assert not isinstance(error, AssertionError), error


def check_leaves(client: Client, name: Callable[[str], str], asked: Asked) -> None:
    assert TEXT.startswith(pieces(client.stream(name("stalled")), most=1)[0])
    gc.collect()  # some clients' streams refer to themselves: they end when they are collected
    eventually_sync(lambda: asked.of("stalled") and asked.of("stalled")[-1].state == "disconnected")


Check = Callable[[Client, Callable[[str], str], Asked], None]
FEATURES: dict[str, tuple[Check, Callable[[type[Client]], bool]]] = {
    "text": (check_text, lambda c: c.ask is not None),
    "stream": (check_stream, lambda c: c.stream is not None),
    "tool, second step": (check_tool, lambda c: c.tool is not None),
    "second turn": (check_turn, lambda c: c.turn is not None),
    "image": (check_image, lambda c: PNG in c.files),
    "document": (check_document, lambda c: PDF in c.files),
    "output schema": (check_record, lambda c: c.record is not None),
    "error": (check_error, lambda c: c.ask is not None),
    "cut": (check_cut, lambda c: c.stream is not None),
    "leaves": (check_leaves, lambda c: c.stream is not None and c.leaves),
}
