"""The model in a body that is forwarded: found, and replaced by the provider's own name of it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from tokenbus_services.gateway.problem import invalid
from tokenbus_services.gateway.surfaces.fields import not_json

T = TypeVar("T")
Fields = dict[str, msgspec.Raw]
_decode = msgspec.json.Decoder(Fields).decode
_OURS = "tokenbus"
"""The gateway's own field of a body."""


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

    @property
    def encoded(self) -> bytes:
        """The body. Of a field that came twice it has the last one."""
        return msgspec.json.encode(self._fields)

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
        """The body of a method of Gemini whose path names the model: objects inside may repeat it. Raises Refusal."""
        name = msgspec.Raw(msgspec.json.encode(f"models/{model}"))
        fields = _renamed(self._fields, name)
        if (inner := fields.get("generateContentRequest")) is not None:
            fields["generateContentRequest"] = _raw(_renamed(_object(bytes(inner), "generateContentRequest"), name))
        if (several := fields.get("requests")) is not None:
            requests = [_renamed(_object(bytes(each), "requests"), name) for each in _list(several, "requests")]
            fields["requests"] = _raw(requests)
        return msgspec.json.encode(fields)


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


def _renamed(fields: Fields, name: msgspec.Raw) -> Fields:
    return {key: name if key == "model" else value for key, value in fields.items()}


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
    try:
        return decode()
    except msgspec.ValidationError:
        raise invalid(where, f"{where or 'the body'} must be {what}") from None
    except UnicodeDecodeError:
        raise not_json("it is not UTF-8") from None
    except RecursionError:
        raise not_json("it is nested too deeply") from None
    except msgspec.DecodeError as e:
        raise not_json(str(e)) from None
