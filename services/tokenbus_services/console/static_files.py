"""The console's files: read from the package, with an etag each, and headers that keep strangers' scripts out."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tokenbus_services.gateway.problem import Problem, Refusal

FOLDER = Path(__file__).parent / "static"
CSP = (
    "default-src 'self'; img-src 'self' blob:; style-src 'self'; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'self'; object-src 'none'"
)
SAFE_HEADERS = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
"""Of every answer of the console."""
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    ".json": "application/json",
    ".txt": "text/plain; charset=utf-8",
    "": "text/plain; charset=utf-8",
}


class _File(msgspec.Struct, frozen=True):
    stamp: tuple[int, int]
    etag: str
    content: bytes


class StaticFiles:
    """Serves the files of one folder. A changed file is read again."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder.resolve()
        self._files: dict[str, _File] = {}

    def answer(self, request: Request, path: str) -> Response:
        """The file, or 304 if the client has it. Raises Refusal (404)."""
        file, media_type = self._find(path)
        headers = {**SAFE_HEADERS, "etag": file.etag, "cache-control": "no-cache"}
        known = request.headers.get("if-none-match", "")
        if file.etag in (one.strip().removeprefix("W/") for one in known.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(file.content, headers=headers, media_type=media_type)

    def _find(self, path: str) -> tuple[_File, str]:
        parts = path.split("/")
        if any(part in ("", ".", "..") or part.startswith(".") or "\\" in part or "\0" in part for part in parts):
            raise _not_found()
        place = self._folder.joinpath(*parts)
        media_type = _TYPES.get(place.suffix)
        if media_type is None:
            raise _not_found()
        try:
            if not place.resolve().is_relative_to(self._folder) or not place.is_file():
                raise _not_found()
            stat = place.stat()
            stamp = (stat.st_mtime_ns, stat.st_size)
            file = self._files.get(path)
            if file is None or file.stamp != stamp:
                content = place.read_bytes()
                file = self._files[path] = _File(stamp, f'"{sha256(content).hexdigest()[:32]}"', content)
        except OSError:
            raise _not_found() from None
        return file, media_type


def _not_found() -> Refusal:
    return Refusal(Problem(status=404, code="not_found", message="no such file", kind="not_found"))
