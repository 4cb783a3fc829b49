"""Signs the headers that identify run, tool call and tenant for an HTTP tool. Pure.

``Tokenbus-Run``        base64url of a JSON object: run, turn, tool_id, tool, tenant, metadata
``Tokenbus-Timestamp``  Unix time in seconds
``Tokenbus-Signature``  ``v1=`` and the HMAC-SHA256, in hex, of these lines joined by line feeds: ``v1``, the timestamp,
                        the method, the request's target (path and query), ``Tokenbus-Run``; then a line feed and the
                        body

docs/guides/tools.md has a function that verifies it.
"""

from __future__ import annotations

import hmac
from base64 import urlsafe_b64encode
from hashlib import sha256

import msgspec

from tokenbus.tools import ToolContext

MAX_METADATA_BYTES = 4096
"""Servers limit the size of headers, mostly to 8 KiB."""
RUN, TIMESTAMP, SIGNATURE = "Tokenbus-Run", "Tokenbus-Timestamp", "Tokenbus-Signature"


def signed_headers(
    secret: str, context: ToolContext, *, tool: str, method: str, target: bytes, body: bytes, now_s: int
) -> dict[str, str]:
    """The headers of one request."""
    run = urlsafe_b64encode(_identity(context, tool)).decode()
    signed = "\n".join(("v1", str(now_s), method, target.decode("ascii"), run, "")).encode() + body
    digest = hmac.new(secret.encode(), signed, sha256).hexdigest()
    return {RUN: run, TIMESTAMP: str(now_s), SIGNATURE: f"v1={digest}"}


def _identity(context: ToolContext, tool: str) -> bytes:
    metadata: object = dict(context.metadata)
    if len(msgspec.json.encode(metadata)) > MAX_METADATA_BYTES:
        metadata = None
    return msgspec.json.encode(
        {
            "run": context.run,
            "turn": context.turn,
            "tool_id": context.tool_id,
            "tool": tool,
            "tenant": context.tenant,
            "metadata": metadata,
        }
    )
