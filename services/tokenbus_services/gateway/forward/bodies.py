"""The model in a body that is forwarded: found, and replaced by the provider's own name of it. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar, cast

import msgspec

from tokenbus_services.gateway.problem import invalid
from tokenbus_services.gateway.surfaces.fields import json_errors

T = TypeVar("T")
Fields = dict[str, msgspec.Raw]
_decode = msgspec.json.Decoder(Fields).decode
_OURS = "tokenbus"
"""The gateway's own field of a body."""
_MAY_NAME = re.compile(rb"(?i)file|cache|vector|\\\\u")
"""What a body contains that names a thing of the provider's account."""
_GEMINI_MODELS = (
    "model",
    "generate_content_request.model",
    "requests.model",
    "batch.model",
    "batch.input_config.requests.requests.request.model",
)


class JsonBody:
    """A JSON object of which only the fields that matter are read. The others stay as they are, byte for byte."""

    def __init__(self, body: bytes) -> None:
        """Raises Refusal."""
        self._fields = _object(body, None)
        self._fields.pop(_OURS, None)

    def text(self, name: str) -> str | None:
        """A text at the top; None if it is not there. Raises Refusal."""
        return _text(self._fields[name], name) if self.has(name) else None

    def has(self, name: str) -> bool:
        return bytes(self._fields.get(name, b"null")) != b"null"

    def leave_out(self, names: Iterable[str]) -> None:
        """Leave out fields at the top."""
        for name in names:
            del self._fields[name]

    def texts(self, path: str) -> list[str]:
        """The texts at a path of fields, `a.b`, in each element of lists on it. A field is found as Google's APIs take
        it: written with `_` or in camel case. Raises Refusal.
        """
        return list(_texts(self._decoded(), path.split(".")))

    @property
    def encoded(self) -> bytes:
        """The body. Of a field that came twice it has the last one."""
        return msgspec.json.encode(self._fields)

    def unambiguous(self) -> None:
        """Write each field once and without escapes, at every level, if any may name a thing: so the provider reads
        what was checked. Raises Refusal.
        """
        if _MAY_NAME.search(self.encoded):
            self._fields = _decode(msgspec.json.encode(self._decoded()))

    def with_model(self, model: str) -> bytes:
        return msgspec.json.encode({**self._fields, "model": model})

    def models_of_requests(self) -> list[str]:
        """The model of each of `requests`. Raises Refusal."""
        named: list[str] = []
        for i, each in enumerate(_list(self._fields.get("requests", msgspec.Raw(b"[]")), "requests")):
            params = _object(
                bytes(_object(bytes(each), f"requests[{i}]").get("params", b"null")), f"requests[{i}].params"
            )
            named.append(_text(params.get("model", msgspec.Raw(b"null")), f"requests[{i}].params.model"))
        if not named:
            raise invalid("requests", "is missing or empty")
        return named

    def with_models(self, models: Sequence[str]) -> bytes:
        requests = [_object(bytes(each), "requests") for each in _list(self._fields["requests"], "requests")]
        for request, model in zip(requests, models, strict=True):
            params = {**_object(bytes(request["params"]), "requests"), "model": _raw(model)}
            request["params"] = _raw(params)
        return msgspec.json.encode({**self._fields, "requests": requests})

    def with_gemini_model(self, model: str) -> bytes:
        """The body for Gemini with this model wherever one may stand; a path that names it may be repeated. Raises
        Refusal.
        """
        value = self._decoded()
        for path in _GEMINI_MODELS:
            value = _with_text(value, path.split("."), f"models/{model}")
        return msgspec.json.encode(value)

    def _decoded(self) -> object:
        return _read(lambda: cast("object", msgspec.json.decode(self.encoded)), None, "a JSON object")


def with_own_results(data: bytes) -> bytes:
    """A batch, or a list of them, whose results their client finds below its own base URL. Raises Refusal."""
    fields = _object(data, None)
    if "data" in fields:
        several = [msgspec.Raw(with_own_results(bytes(each))) for each in _list(fields["data"], "data")]
        return msgspec.json.encode({**fields, "data": several})
    one = _text(fields.get("id", msgspec.Raw(b'""')), "id")
    if bytes(fields.get("results_url", b"null")) != b"null":
        fields["results_url"] = _raw(f"/v1/messages/batches/{one}/results")
    return msgspec.json.encode(fields)


def _with_text(value: object, path: Sequence[str], text: str) -> object:
    if isinstance(value, list):
        return [_with_text(each, path, text) for each in cast("list[object]", value)]
    if not path or not isinstance(value, dict):
        return value if path else text
    fields = cast("dict[str, object]", value)
    return {
        name: _with_text(each, path[1:], text) if _plain(name) == _plain(path[0]) else each
        for name, each in fields.items()
    }


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


def _texts(value: object, path: Sequence[str]) -> Iterator[str]:
    match value:
        case str() if not path:
            yield value
        case list():
            for each in cast("list[object]", value):
                yield from _texts(each, path)
        case dict() if path:
            for name, each in cast("dict[str, object]", value).items():
                if _plain(name) == _plain(path[0]):
                    yield from _texts(each, path[1:])
        case _:
            pass


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def _object(data: bytes, where: str | None) -> Fields:
    return _read(lambda: _decode(data), where, "a JSON object")


def _list(data: msgspec.Raw, where: str) -> list[msgspec.Raw]:
    return _read(lambda: msgspec.json.decode(bytes(data), type=list[msgspec.Raw]), where, "a list")


def _text(data: msgspec.Raw, where: str) -> str:
    return _read(lambda: msgspec.json.decode(bytes(data), type=str), where, "a text")


def _read(decode: Callable[[], T], where: str | None, what: str) -> T:
    """Raises Refusal."""
    with json_errors():
        try:
            return decode()
        except msgspec.ValidationError:
            raise invalid(where, f"{where or 'the body'} must be {what}") from None
