"""Python tools: callables given as `module:function`."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from tokenbus.errors import ToolFailure
from tokenbus.tools import ToolContext
from tokenbus_services.tools.python.thread_pool import NoThread, Threads
from tokenbus_services.tools.results import Results, outcome_of
from tokenbus_services.tools.tool_call import Text, ToolCall, ToolOutcome

CONTEXT = "context"
"""A callable with a parameter of this name gets the `ToolContext`, unless the tool's schema defines that name."""

_log = structlog.stdlib.get_logger()


class CallableTool:
    """Calls a function with the arguments by name: coroutine functions in the event loop, others in a thread.

    A coroutine is cancelled on timeout. It must not block: that would stop all calls of this worker.
    """

    def __init__(self, name: str, path: str, parameters: dict[str, object], threads: Threads) -> None:
        """Raises ValueError if the path cannot be resolved or is not callable."""
        self._name = name
        self._threads = threads
        self._call = _resolve(path)
        self._in_loop = inspect.iscoroutinefunction(self._call) or inspect.iscoroutinefunction(
            getattr(self._call, "__call__", None)  # noqa: B004 - an object whose `__call__` method is async
        )
        self._signature = _signature(self._call)
        self._wants_context = _wants_context(self._signature, parameters)

    async def run(
        self, call: ToolCall, arguments: dict[str, object], context: ToolContext, results: Results
    ) -> Text | ToolOutcome:
        """Call the function and return its result. Raises ToolFailure."""
        given = {**arguments, CONTEXT: context} if self._wants_context else arguments
        try:
            if self._signature is not None:
                self._signature.bind(**given)
        except TypeError as e:
            raise ToolFailure(self._name, "bad_arguments", f"the arguments do not fit: {e}") from None
        try:
            value = await self._value(given)
        except NoThread as e:
            raise ToolFailure(self._name, "busy", str(e)) from None
        except ToolFailure as e:
            raise ToolFailure(self._name, e.kind, e.problem) from None
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as e:  # a SystemExit or KeyboardInterrupt raised by a tool is not meant for the worker
            # The message may hold anything, so it is not logged.
            _log.warning("tool_raised", run=call.run, tool=self._name, error=type(e).__name__, at=_place(e))
            raise ToolFailure(self._name, "exception", f"{type(e).__name__}: {e}") from None
        return await outcome_of(self._name, value, results)

    async def _value(self, given: dict[str, Any]) -> object:
        if self._in_loop:
            return await self._call(**given)
        value: object = await self._threads.run(partial(self._call, **given))
        # A plain function may return a coroutine, as a wrapped one does.
        return await value if inspect.isawaitable(value) else value


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
