"""Parses multipart form bodies (multipart/form-data, RFC 7578)."""

from __future__ import annotations

import re
from typing import Any

from tokenbus_services.mock_provider.request import HttpError

MULTIPART = "multipart/form-data"
_BOUNDARY = re.compile(r'boundary=(?:"([^"]+)"|([^\s;"]+))', re.IGNORECASE)
_NAME = re.compile(r'(?<!file)name="([^"]*)"', re.IGNORECASE)
_FILENAME = re.compile(r'filename="([^"]*)"', re.IGNORECASE)
_ESCAPED = {"%22": '"', "%0D": "\r", "%0A": "\n"}


def read_form(content_type: str, body: bytes) -> dict[str, Any]:
    """The fields: a text as str, a file as its ``filename``, ``media_type`` and ``data``, and a list if a name ends
    with ``[]``. Raises Rejected."""
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise HttpError(400, "the form has no boundary")
    first, *parts = (b"\r\n" + body).split(b"\r\n--" + (found[1] or found[2]).encode())
    if first or not parts or parts.pop().rstrip(b"\r\n") != b"--":
        raise HttpError(400, "the form does not begin and end with its boundary")
    fields: dict[str, Any] = {}
    for part in parts:
        name, value = _read(part)
        if name.endswith("[]"):
            fields.setdefault(name, []).append(value)
        elif name in fields:
            raise HttpError(400, f"Duplicate parameter: {name!r}")
        else:
            fields[name] = value
    return fields


def _read(part: bytes) -> tuple[str, Any]:
    head, blank, content = part.partition(b"\r\n\r\n")
    headers: dict[str, str] = {}
    for line in head.decode("utf-8", "replace").split("\r\n")[1:]:
        header, _, value = line.partition(":")
        headers[header.strip().lower()] = value.strip()
    disposition = headers.get("content-disposition", "")
    name, filename = _NAME.search(disposition), _FILENAME.search(disposition)
    if not (blank and name):
        raise HttpError(400, "a part of the form has no name")
    if filename is None:
        return _plain(name[1]), content.decode("utf-8", "replace")
    media_type = headers.get("content-type", "application/octet-stream")
    return _plain(name[1]), {"filename": _plain(filename[1]), "media_type": media_type, "data": content}


def _plain(name: str) -> str:
    for escaped, character in _ESCAPED.items():
        name = name.replace(escaped, character)
    return name
