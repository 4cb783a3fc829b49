"""Replace large base64 and named parts of a JSON value by blob references, and restore them. Pure.

A part that is taken out leaves ``{"__blobRef": blob id, "originalSize": …, "mediaType": …}``. If its text is not plain
padded base64 on one line, a fourth member ``form`` records its formatting. Text that cannot be reproduced exactly stays
in place. A member of the value itself named `__blobRef`, with any number of trailing underscores, gets one more
underscore and loses it on restore, so data that only looks like a reference survives.
"""

from __future__ import annotations

import json
import re
import sys
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

import msgspec

from tokenbus.blobs import DEFAULT_MEDIA_TYPE, blob_id_of, parse_blob_id, parse_media_type
from tokenbus.errors import BlobNotFound, BlobRefused, CircularValue, Malformed, NestedTooDeep, NotStorable

REF = "__blobRef"
THRESHOLD = 10 * 1024
"""Base64 of up to this many characters stays in place."""
MAX_DEPTH = 200
"""Maximum nesting of lists and objects, far below Python's recursion limit."""

_REF_LIKE = re.compile(rf"{REF}_*")
_DATA_URL = re.compile(r"data:([^,]{0,255}?);base64,", re.IGNORECASE)
_TYPE_KEYS = ("media_type", "mediaType", "mime_type", "mimeType")
"""Keys that give the media type of base64 beside them: Anthropic's and tokenbus' name, and Gemini's two."""

Path: TypeAlias = tuple[str, ...]


class Form(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Original formatting of the content."""

    kind: Literal["base64", "text", "json"] = "base64"
    head: str = ""
    """Text before the base64: the start of a data URL."""
    urlsafe: bool = False
    padded: bool = True
    line: int = 0
    """Characters per line; 0: a single line."""
    line_end: Literal["", "\n", "\r\n"] = ""
    last_line_ends: bool = False


class _Ref(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    blob_id: str = msgspec.field(name=REF)
    size: int = msgspec.field(name="originalSize")
    """Length of the original text in characters."""
    media_type: str = msgspec.field(name="mediaType")
    form: Form | None = None
    """None: padded base64 on one line."""


class BlobPart(msgspec.Struct, frozen=True):
    """A part for the blob store."""

    content: bytes
    media_type: str


class Sanitized(msgspec.Struct, frozen=True):
    """A value without its large parts, and the parts."""

    value: Any
    parts: Mapping[str, BlobPart]
    """By blob id; identical contents are one part."""


def sanitize(value: object, *, threshold: int = THRESHOLD, paths: Sequence[str] = ()) -> Sanitized:
    """Take out base64 of more than ``threshold`` characters, and the values at ``paths`` in any size.

    A path is a JSON Pointer (RFC 6901) in which `*` matches any member or index. Paths apply to text, lists and
    objects; other values stay. ``value`` is not modified. Raises NotStorable if it is not a JSON value, CircularValue
    or NestedTooDeep, and ValueError for an invalid path.
    """
    walk = _Sanitizing(threshold)
    return Sanitized(walk.walk(value, [_path(p) for p in paths], (), ""), walk.parts)


def refs(value: object) -> set[str]:
    """Ids of the blobs that `restore` needs. Raises NotStorable, and Malformed for an invalid reference."""
    return {ref.blob_id for ref in _refs(value, ())}


def restore(value: object, contents: Mapping[str, bytes]) -> Any:
    """Restore exactly the value that `sanitize` was given.

    Raises what `refs` does, BlobNotFound if ``contents`` lacks a blob, and Malformed if a blob does not fit its
    reference.
    """
    return _restored(value, contents, ())


# --- sanitize ---------------------------------------------------------------------------------------------------


class _Sanitizing:
    def __init__(self, threshold: int) -> None:
        self.parts: dict[str, BlobPart] = {}
        self._threshold = threshold
        self._open: set[int] = set()
        """Identities of the enclosing lists and objects."""

    def walk(self, value: Any, paths: Sequence[Path], at: Path, media_type: str) -> Any:
        named = () in paths
        match value:
            case str():
                return self._text(value, media_type, named=named)
            case list() | dict():
                return self._container(cast("list[Any] | dict[Any, Any]", value), paths, at, named=named)
            case None | bool() | int() | float():
                return value
            case _:
                raise NotStorable(pointer(at), f"{type(value).__name__} is not a JSON value")

    def _container(self, value: list[Any] | dict[Any, Any], paths: Sequence[Path], at: Path, *, named: bool) -> Any:
        if id(value) in self._open:
            raise CircularValue(pointer(at))
        if len(at) >= MAX_DEPTH:
            raise NestedTooDeep(pointer(at), MAX_DEPTH)
        if named:
            _Sanitizing(sys.maxsize).walk(value, (), at, "")  # stored as a whole, but must still be JSON
            return self._json(value, at)
        self._open.add(id(value))
        inside = self._inside(value, paths, at)
        self._open.remove(id(value))
        return inside

    def _inside(self, value: list[Any] | dict[Any, Any], paths: Sequence[Path], at: Path) -> Any:
        if isinstance(value, list):
            return [self.walk(v, _beneath(paths, str(i)), (*at, str(i)), "") for i, v in enumerate(value)]
        media_type = next((t for k in _TYPE_KEYS if isinstance(t := value.get(k), str)), "")
        walked: dict[str, Any] = {}
        for key, v in value.items():
            if not isinstance(key, str):
                raise NotStorable(pointer(at), f"a member's name is {type(key).__name__}, and not text")
            walked[_escaped(key)] = self.walk(v, _beneath(paths, key), (*at, key), media_type)
        return walked

    def _text(self, text: str, media_type: str, *, named: bool) -> Any:
        if len(text) <= self._threshold and not (named and text):
            return text
        if found := _read_base64(text):
            content, form = found
            data_url = _DATA_URL.match(form.head)
            return self._take(content, len(text), data_url[1] if data_url else media_type, form)
        if named:
            return self._take(text.encode("utf-8", "surrogatepass"), len(text), "text/plain", Form(kind="text"))
        return text

    def _json(self, value: object, at: Path) -> Any:
        try:
            # Keep Python's NaN, and lone surrogates unescaped: escaped halves of a pair would be joined on the way
            # back.
            text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        except ValueError as e:
            raise NotStorable(pointer(at), str(e)) from None
        content = text.encode("utf-8", "surrogatepass")
        return self._take(content, len(text), "application/json", Form(kind="json"))

    def _take(self, content: bytes, size: int, media_type: str, form: Form) -> Any:
        try:
            media_type = parse_media_type(media_type)
        except BlobRefused:
            media_type = DEFAULT_MEDIA_TYPE
        blob_id = blob_id_of(content)
        kept = self.parts.setdefault(blob_id, BlobPart(content, media_type))
        ref = _Ref(blob_id=blob_id, size=size, media_type=kept.media_type, form=None if form == Form() else form)
        return msgspec.to_builtins(ref)


def _read_base64(text: str) -> tuple[bytes, Form] | None:
    """The decoded content and its formatting; None if it is not base64 that can be reproduced exactly."""
    head = found[0] if (found := _DATA_URL.match(text)) else ""
    body = text[len(head) :]
    line_end: Literal["", "\n", "\r\n"] = "\r\n" if "\r\n" in body else "\n" if "\n" in body else ""
    flat = body.replace(line_end, "") if line_end else body
    form = Form(
        head=head,
        urlsafe="-" in flat or "_" in flat,
        padded=len(flat) % 4 == 0,
        line=body.index(line_end) if line_end else 0,
        line_end=line_end,
        last_line_ends=bool(line_end) and body.endswith(line_end),
    )
    try:
        content = b64decode(flat + "=" * (-len(flat) % 4), b"-_" if form.urlsafe else None, validate=True)
    except ValueError:
        return None
    return (content, form) if _spelled(content, form) == text else None


def _escaped(key: str) -> str:
    return f"{key}_" if _REF_LIKE.fullmatch(key) else key


# --- restore ----------------------------------------------------------------------------------------------------


def _refs(value: object, at: Path) -> Iterator[_Ref]:
    for ref_or_part, where in _children(value, at):
        if isinstance(ref_or_part, _Ref):
            yield ref_or_part
        else:
            yield from _refs(ref_or_part, where)


def _children(value: Any, at: Path) -> Iterator[tuple[Any, Path]]:
    if isinstance(value, dict) and REF in value:
        yield _ref(cast("dict[str, Any]", value), at), at
    elif isinstance(value, dict | list) and len(at) >= MAX_DEPTH:
        raise NestedTooDeep(pointer(at), MAX_DEPTH)
    elif isinstance(value, dict):
        yield from ((v, (*at, k)) for k, v in cast("dict[str, Any]", value).items())
    elif isinstance(value, list):
        yield from ((v, (*at, str(i))) for i, v in enumerate(cast("list[Any]", value)))


def _restored(value: Any, contents: Mapping[str, bytes], at: Path) -> Any:
    parts = list(_children(value, at))
    if parts and isinstance(parts[0][0], _Ref):
        return _put_back(parts[0][0], contents, at)
    if isinstance(value, dict):
        keys = cast("dict[str, Any]", value)
        return {_unescaped(k): _restored(v, contents, w) for k, (v, w) in zip(keys, parts, strict=True)}
    if isinstance(value, list):
        return [_restored(v, contents, w) for v, w in parts]
    return value


def _put_back(ref: _Ref, contents: Mapping[str, bytes], at: Path) -> Any:
    content = contents.get(ref.blob_id)
    if content is None:
        raise BlobNotFound(ref.blob_id)
    form = ref.form or Form()
    try:
        text = _spelled(content, form) if form.kind == "base64" else content.decode("utf-8", "surrogatepass")
        value = json.loads(text) if form.kind == "json" else text
    except ValueError as e:
        raise Malformed(f"reference at {pointer(at)}", f"the blob is no {form.kind}: {e}") from None
    if len(text) != ref.size:
        raise Malformed(f"reference at {pointer(at)}", f"{len(text)} characters were restored, {ref.size} went")
    return value


def _ref(value: Mapping[str, Any], at: Path) -> _Ref:
    try:
        ref = msgspec.convert(value, _Ref)
        parse_blob_id(ref.blob_id)
    except (msgspec.ValidationError, BlobRefused) as e:
        raise Malformed(f"reference at {pointer(at)}", str(e)) from None
    return ref


def _unescaped(key: str) -> str:
    return key[:-1] if _REF_LIKE.fullmatch(key) else key


# --- shared -----------------------------------------------------------------------------------------------------


def _spelled(content: bytes, form: Form) -> str:
    text = b64encode(content, b"-_" if form.urlsafe else None).decode()
    if not form.padded:
        text = text.rstrip("=")
    if form.line > 0:
        text = form.line_end.join(text[i : i + form.line] for i in range(0, len(text), form.line))
    return form.head + text + (form.line_end if form.last_line_ends else "")


def _path(text: str) -> Path:
    if text and not text.startswith("/"):
        raise ValueError(f"path {text!r}: must be empty or begin with /")
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in text.split("/")[1:])


def _beneath(paths: Sequence[Path], key: str) -> list[Path]:
    return [path[1:] for path in paths if path and path[0] in (key, "*")]


def pointer(at: Path) -> str:
    """JSON Pointer of a path; `/` for the root value."""
    return "".join("/" + part.replace("~", "~0").replace("/", "~1") for part in at) or "/"
