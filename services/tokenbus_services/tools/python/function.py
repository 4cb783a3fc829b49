"""Python tools: callables given as `module:function`, and what they return."""

from __future__ import annotations

import asyncio
import contextvars
import importlib
import inspect
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import structlog

from tokenbus.errors import ToolFailure
from tokenbus.tools import Image, ToolContext
from tokenbus_services.tools.questions import Asking, PutAway, Question, Wait
from tokenbus_services.tools.tool_call import Text, ToolCall

CONTEXT = "context"
"""A callable with a parameter of this name gets the `ToolContext`, unless the tool's schema defines that name."""

_log = structlog.stdlib.get_logger()


class ToolFunction:
    """Calls a function with the arguments by name: coroutine functions in the event loop, others in a thread."""

    def __init__(self, name: str, path: str, parameters: dict[str, object]) -> None:
        """Raises ValueError if the path cannot be resolved or is not callable."""
        self._name = name
        self._call = _resolve(path)
        self._in_loop = inspect.iscoroutinefunction(self._call) or inspect.iscoroutinefunction(
            getattr(self._call, "__call__", None)  # noqa: B004 - an object whose `__call__` method is async
        )
        self._signature = _signature(self._call)
        self._wants_context = _wants_context(self._signature, parameters)

    async def __call__(
        self, call: ToolCall, arguments: dict[str, object], context: ToolContext, wait: Wait | None
    ) -> list[Text | Image] | Question:
        """Call the function and return its result, or what it asks. Raises ToolFailure, MemoryError.

        Once it has asked, nothing that it does then counts: it cannot catch its own end. ``wait``: see `Asking`.
        """
        asking = Asking(call.answers, wait)
        try:
            parts = await self._parts(call.run, arguments, msgspec.structs.replace(context, ask=asking.ask))
        except (MemoryError, GeneratorExit):
            raise
        except BaseException:
            if asking.ended is None:
                raise
            parts = []
        match asking.ended:
            case None:
                return parts
            case Question() as question:
                return question
            case problem:
                raise ToolFailure(self._name, "bad_question", problem)

    async def _parts(self, run: str, arguments: dict[str, object], context: ToolContext) -> list[Text | Image]:
        given = {**arguments, CONTEXT: context} if self._wants_context else arguments
        try:
            if self._signature is not None:
                self._signature.bind(**given)
        except TypeError as e:
            raise ToolFailure(self._name, "bad_arguments", f"the arguments do not fit: {e}") from None
        try:
            value = await self._value(given)
        except ToolFailure as e:
            raise ToolFailure(self._name, e.kind, e.problem) from None
        except (asyncio.CancelledError, GeneratorExit, MemoryError, PutAway):
            raise
        except BaseException as e:  # a SystemExit or KeyboardInterrupt raised by a tool is not meant for the process
            # The message may hold anything, so it is not logged.
            _log.warning("tool_raised", run=run, tool=self._name, error=type(e).__name__, at=_place(e))
            raise ToolFailure(self._name, "exception", f"{type(e).__name__}: {e}") from None
        return parts_of(self._name, value)

    async def _value(self, given: dict[str, Any]) -> object:
        if self._in_loop:
            return await self._call(**given)
        value: object = await _in_thread(partial(self._call, **given))
        # A plain function may return a coroutine, as a wrapped one does.
        return await value if inspect.isawaitable(value) else value


def parts_of(tool: str, value: object) -> list[Text | Image]:
    """Convert a return value: images, alone or in a list, stay images; anything else becomes text. Raises ToolFailure.

    Strings are taken verbatim, None is empty text, and other values are JSON.
    """
    several = cast("Sequence[object]", value) if isinstance(value, list | tuple) else [value]
    if any(isinstance(one, Image) for one in several):
        return [one if isinstance(one, Image) else _text(tool, one) for one in several]
    return [_text(tool, cast("object", value))]


def _text(tool: str, value: object) -> Text:
    if value is None or isinstance(value, str):
        return Text(value or "")
    try:
        return Text(msgspec.json.encode(value).decode(), "application/json")
    except (TypeError, ValueError, RecursionError) as e:
        raise ToolFailure(tool, "bad_result", f"the tool returned a value that is not JSON-serializable: {e}") from None


async def _in_thread(call: Callable[[], object]) -> object:
    """Run the call in a thread that does not keep the process from exiting. If cancelled, the call continues."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[tuple[object, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def end(value: object, error: BaseException | None) -> None:
        if not ended.cancelled():
            ended.set_result((value, error))  # a StopIteration cannot be a future's exception

    def work() -> None:
        value, error = None, None
        try:
            value = context.run(call)
        except BaseException as e:
            error = e
        with suppress(RuntimeError):  # the loop was closed while the call ran
            loop.call_soon_threadsafe(end, value, error)

    threading.Thread(target=work, name="tool", daemon=True).start()
    value, error = await ended
    if error is not None:
        raise error
    return value


def _resolve(path: str) -> Callable[..., Any]:
    module_name, colon, names = path.partition(":")
    if not (module_name and colon and names):
        raise ValueError(f"{path!r} is not of the form module:function")
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as e:
        raise ValueError(f"module {module_name!r} cannot be imported: {type(e).__name__}: {e}") from e
    for name in names.split("."):
        if not hasattr(found, name):
            raise ValueError(f"module {module_name!r} has no {names!r}")
        found = getattr(found, name)
    if not callable(found):
        raise ValueError(f"{path!r} is not callable: it is of type {type(found).__name__}")
    return found


def _signature(call: Callable[..., Any]) -> inspect.Signature | None:
    """The signature, or None if Python does not know it, as for some builtins. Raises ValueError if it has a required
    positional-only parameter.
    """
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):
        return None
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise ValueError(f"parameter {parameter.name!r} cannot be passed by name")
    return signature


def _wants_context(signature: inspect.Signature | None, parameters: dict[str, object]) -> bool:
    properties = parameters.get("properties")
    return (
        signature is not None
        and CONTEXT in signature.parameters
        and not (isinstance(properties, dict) and CONTEXT in properties)
    )


def _place(e: BaseException) -> str:
    """File, line and function of the innermost frame."""
    frames = traceback.extract_tb(e.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno} {frames[-1].name}" if frames else ""
