"""What a client asks of the bus beyond its own protocol: the object `tokenbus` in the body, or headers `x-tokenbus-…`.

Headers serve clients that cannot add to the body; the body wins. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast, get_args

import msgspec

from tokenbus.events.requests import OnFailure, RunId, Tool
from tokenbus_services.gateway.problem import extra_not_open, invalid, tool_not_open
from tokenbus_services.gateway.surfaces.contract import Disconnect, TranslationRules
from tokenbus_services.gateway.surfaces.fields import Fields, Json

HEADER = "x-tokenbus-"
_LISTS = ("tools", "policies")
_FLAGS = ("visible", "record")
_NUMBERS = ("max-tool-depth", "deadline-s")
_TEXTS = ("run", "on-failure", "on-disconnect")


class Extension(msgspec.Struct, frozen=True, kw_only=True):
    """The options, checked against what the client's key allows."""

    run: str | None = None
    """A run id that the client chose."""
    tools: list[Tool] = []
    """Tools of the deployment, run by the bus."""
    max_tool_depth: int | None = None
    on_failure: OnFailure | None = None
    deadline_s: float | None = None
    policies: list[str] = []
    visible: bool | None = None
    record: bool | None = None
    extra: dict[str, object] | None = None
    """Fields of the provider's own body."""
    on_disconnect: Disconnect | None = None

    @property
    def generate(self) -> Json:
        """The fields of the bus request that were given, without tools and extra."""
        given = {
            "on_failure": self.on_failure,
            "deadline_s": self.deadline_s,
            "policies": self.policies or None,
            "visible": self.visible,
            "record": self.record,
        }
        return {name: value for name, value in given.items() if value is not None}


def extension(body: Fields, headers: Mapping[str, str], rules: TranslationRules) -> Extension:
    """Read the object `tokenbus` and the headers. Raises Refusal."""
    inside = body.json("tokenbus") or {}
    fields = Fields({**_of_headers(headers), **inside}, "tokenbus")
    read = Extension(
        run=_run(fields),
        tools=_tools(fields, rules),
        max_tool_depth=fields.whole("max_tool_depth"),
        on_failure=cast("OnFailure | None", fields.one_of("on_failure", get_args(OnFailure))),
        deadline_s=_deadline(fields),
        policies=fields.texts("policies"),
        visible=fields.flag("visible"),
        record=fields.flag("record"),
        extra=_extra(fields, rules),
        on_disconnect=cast("Disconnect | None", fields.one_of("on_disconnect", get_args(Disconnect))),
    )
    fields.end()
    return read


def _run(fields: Fields) -> str | None:
    value = fields.text("run")
    try:
        return msgspec.convert(value, RunId | None)
    except msgspec.ValidationError as e:
        raise invalid("tokenbus.run", str(e)) from None


def _tools(fields: Fields, rules: TranslationRules) -> list[Tool]:
    names = fields.texts("tools")
    for i, name in enumerate(names):
        if rules.tools is not None and name not in rules.tools:
            raise invalid(f"tokenbus.tools[{i}]", tool_not_open(name))
    return [Tool(name=name) for name in names]


def _deadline(fields: Fields) -> float | None:
    value = fields.number("deadline_s")
    if value is not None and value <= 0:
        raise invalid("tokenbus.deadline_s", "must be greater than 0")
    return value


def _extra(fields: Fields, rules: TranslationRules) -> dict[str, object] | None:
    extra = fields.json("extra")
    for name in extra or {}:
        if name not in rules.allow_extra:
            raise extra_not_open(f"tokenbus.extra.{name[:100]}")
    return extra


def _of_headers(headers: Mapping[str, str]) -> Json:
    """The options of the headers, in the form that the body has. Raises Refusal."""
    read: dict[str, Any] = {}
    for name in (*_LISTS, *_FLAGS, *_NUMBERS, *_TEXTS):
        value = headers.get(HEADER + name)
        if value is None:
            continue
        field = name.replace("-", "_")
        if name in _LISTS:
            read[field] = [each.strip() for each in value.split(",") if each.strip()]
        elif name in _FLAGS:
            read[field] = _flag(name, value)
        elif name in _NUMBERS:
            read[field] = _number(name, value)
        else:
            read[field] = value
    return read


def _flag(name: str, value: str) -> bool:
    if value not in ("true", "false"):
        raise invalid(HEADER + name, "must be true or false")
    return value == "true"


def _number(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise invalid(HEADER + name, "must be a number")
    return number
