"""Loads policies by import path, with options from a settings file."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tokenbus import policy as policy_api
from tokenbus.errors import SettingsError
from tokenbus.policy.policy_runner import BoundPolicy, Handling, OnError
from tokenbus.policy.processor import Function, FunctionPolicy, StreamContext, StreamProcessor
from tokenbus.policy.stream_state import StreamState


class PolicySpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A policy as given in the settings."""

    policy: Annotated[str, Meta(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$(?!\n)")]
    """``package.module:Name`` of its class, or of a function."""
    options: dict[str, Any] = {}
    on_error: OnError = "block"
    timeout_s: Annotated[float, Meta(gt=0)] = 30.0
    name: str = ""
    """Its name in decisions; empty: the class's name."""


def load(spec: PolicySpec, source: str = "policy") -> Callable[[], BoundPolicy]:
    """Return a factory that makes a `BoundPolicy` per stream. Imports the class and decodes the options at once.

    Raises SettingsError, with ``source`` and the path, if the class does not exist or its options are invalid.
    """
    module, _, attribute = spec.policy.partition(":")
    if module.startswith("tokenbus.policy.") and attribute in policy_api.__all__:
        module = policy_api.__name__  # earlier documentation named built-in policies by file
    try:
        found: object = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as e:
        raise SettingsError(source, spec.policy, f"cannot be imported: {e}") from e
    except (Exception, SystemExit) as e:  # what the module does at its import
        raise SettingsError(source, spec.policy, f"its import raised {type(e).__name__}: {e}") from e
    handling = Handling(on_error=spec.on_error, timeout_s=spec.timeout_s)
    if callable(found) and not isinstance(found, type):
        if spec.options:
            raise SettingsError(source, spec.policy, "is a function, which takes no options")
        function: Any = found
        return lambda: BoundPolicy(spec.name or attribute, FunctionPolicy(function), handling)
    if not (isinstance(found, type) and issubclass(found, StreamProcessor)):
        raise SettingsError(source, spec.policy, "is neither a class of StreamProcessor nor a function")
    if inspect.isabstract(found):
        raise SettingsError(source, spec.policy, "is only the base class of policies")
    policy = found
    options = policy.from_options(spec.options).options
    name = spec.name or policy.__name__

    def bound() -> BoundPolicy:
        try:
            return BoundPolicy(name, policy(options), handling)
        except Exception as e:  # the first one was made: it is the policy's error, as if it failed at its first call
            problem = f"it could not be made: {type(e).__name__}: {e}"
            return BoundPolicy(name, FunctionPolicy(_raising(problem)), handling)

    return bound


def _raising(problem: str) -> Function:
    async def fail(chunk: Any, state: StreamState, context: StreamContext[Any]) -> None:
        raise RuntimeError(problem)

    return fail
