"""The pages that every service has: health, readiness, metrics, and its AsyncAPI document.

FastStream's own document page loads scripts from other hosts and also serves ``POST /asyncapi/try``, which wraps a test
broker around the live one: after a single request the worker reads nothing more. This page has no scripts, and all
pages are read-only.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
from faststream.asgi import AsgiResponse, get

Route = tuple[str, Any]

_SAFE = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body{{font:16px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;padding:0 1rem}}
pre{{overflow:auto;background:#8881;padding:1rem}}
td,th{{text-align:left;vertical-align:top;padding:.2rem .8rem .2rem 0}}
</style>
<h1>{title}</h1>
<p>AsyncAPI {version}. The same as JSON: <a href="asyncapi.json">asyncapi.json</a>.</p>
<table><tr><th>channel</th><th>stream</th><th>what it holds</th></tr>{channels}</table>
<h2>Document</h2>
<pre>{document}</pre>
</html>
"""


def document_routes(document: Callable[[], Any]) -> list[Route]:
    """The routes ``/asyncapi``, a page for people, and ``/asyncapi.json`` of this AsyncAPI document."""

    # Rendered once, at the first request: it never changes, and requests must not cost the service time.
    made = cache(document)
    page = cache(
        lambda: AsgiResponse(_page(made()).encode(), 200, {"content-type": "text/html; charset=utf-8", **_SAFE})
    )
    data = cache(lambda: json_answer(200, made()))

    @get(include_in_schema=False)
    async def as_page(scope: Any) -> AsgiResponse:
        return page()

    @get(include_in_schema=False)
    async def as_json(scope: Any) -> AsgiResponse:
        return data()

    return [("/asyncapi", as_page), ("/asyncapi.json", as_json)]


def json_answer(status: int, body: Any) -> AsgiResponse:
    """A JSON response that browsers do not sniff as another type."""
    headers = {"content-type": "application/json", "x-content-type-options": "nosniff"}
    return AsgiResponse(msgspec.json.encode(body), status, headers)


def _page(document: dict[str, Any]) -> str:
    channels: dict[str, dict[str, Any]] = document.get("channels", {})
    rows = [
        _row(name, str(channel.get("address", "")), str(channel.get("description", "")))
        for name, channel in channels.items()
    ]
    pretty = msgspec.json.format(msgspec.json.encode(document), indent=2).decode()
    return _PAGE.format(
        title=html.escape(document["info"]["title"]),
        version=html.escape(document["asyncapi"]),
        channels="".join(rows),
        document=html.escape(pretty),
    )


def _row(*cells: str) -> str:
    return "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"
