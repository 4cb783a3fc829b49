"""HTTP endpoint tools: the arguments form the request, the response body is the result."""

from __future__ import annotations

import hmac
import time
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from hashlib import sha256

import httpx
import msgspec

from tokenbus.blobs import DEFAULT_MEDIA_TYPE, parse_media_type
from tokenbus.errors import BlobRefused, SettingsError, ToolFailure
from tokenbus.secret_env import Secret
from tokenbus.tools import ToolContext
from tokenbus_services.net.egress import AddressRefused, GuardedTransport
from tokenbus_services.net.http_client import Client, TooManyCrumbs, fair_reads
from tokenbus_services.net.outbound import Headers, Learn, egress_of, endpoint_url
from tokenbus_services.settings import HttpTool
from tokenbus_services.tools.questions import Holding
from tokenbus_services.tools.results import Results
from tokenbus_services.tools.tool_call import ToolCall, ToolOutcome

_ERROR_BODY_BYTES = 2000


class EndpointTool:
    """Sends the arguments as a JSON body, or for GET as the query: strings verbatim, other values as JSON.

    ``Idempotency-Key`` is the same whenever a call is sent again. Redirects are not followed, so the settings alone
    decide where the arguments and secret headers go; `egress` restricts the addresses. Bodies are read unencoded, so
    that their size is bounded.
    """

    def __init__(self, name: str, settings: HttpTool, env: Mapping[str, str], *, learn: Learn | None = None) -> None:
        """``learn`` gets the secrets, also those that replace others later. Raises ValueError if the settings are
        invalid.
        """
        self._name = name
        self._method = settings.method
        self._url = endpoint_url(settings.url)
        self._headers = Headers(settings, env, learn)
        self._signing = signing_secret(settings, env)
        self._learn = learn
        self._client = Client(
            GuardedTransport(egress_of(settings)),
            # The whole call has its own timeout; this only keeps connecting from using it up.
            timeout=httpx.Timeout(None, connect=10.0),
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def run(
        self, call: ToolCall, arguments: dict[str, object], context: ToolContext, results: Results, *, holding: Holding
    ) -> ToolOutcome:
        """Send the call and return the response. Raises ToolFailure."""
        try:
            response = await self._client.send(
                self._request(call, arguments, context), stream=True, follow_redirects=False
            )
        except AddressRefused as e:
            raise ToolFailure(self._name, "address_refused", str(e)) from None
        except httpx.HTTPError as e:
            raise self._network(e) from None
        try:
            if response.headers.get("content-encoding", "identity") != "identity":
                raise ToolFailure(self._name, "bad_result", "the response is compressed, which was not requested")
            if not response.is_success:
                raise ToolFailure(self._name, "http_status", await self._refusal(response))
            chunks = self._chunks(response)
            return await results.stream(chunks, _media_type(response), response.charset_encoding or "utf-8")
        finally:
            await response.aclose()

    def _request(self, call: ToolCall, arguments: dict[str, object], context: ToolContext) -> httpx.Request:
        request = self._unsigned(call, arguments)
        if self._signing:
            secret = self._signing.value
            if self._learn:
                self._learn([secret])
            request.headers.update(
                signed_headers(
                    secret,
                    context,
                    tool=call.name,
                    method=request.method,
                    target=request.url.raw_path,
                    body=request.content,
                    now_s=int(time.time()),
                )
            )
        return request

    def _unsigned(self, call: ToolCall, arguments: dict[str, object]) -> httpx.Request:
        headers = {"Idempotency-Key": call.key, "Accept-Encoding": "identity"}
        if call.traceparent:
            headers["traceparent"] = call.traceparent
        if self._method == "GET":
            query = {k: v if isinstance(v, str) else msgspec.json.encode(v).decode() for k, v in arguments.items()}
            url = self._url.copy_merge_params(query)
            return self._client.build_request("GET", url, headers={**headers, **self._headers()})
        headers["Content-Type"] = "application/json"
        content = msgspec.json.encode(arguments)
        return self._client.build_request(
            self._method, self._url, content=content, headers={**headers, **self._headers()}
        )

    async def _chunks(self, response: httpx.Response) -> AsyncIterator[bytes]:
        try:
            async with aclosing(fair_reads(response.aiter_raw())) as reads:
                async for chunk in reads:
                    yield chunk
        except TooManyCrumbs as e:
            raise ToolFailure(self._name, "bad_result", str(e)) from None
        except httpx.HTTPError as e:
            raise self._network(e) from None

    async def _refusal(self, response: httpx.Response) -> str:
        body = b""
        async for chunk in self._chunks(response):
            body += chunk
            if len(body) >= _ERROR_BODY_BYTES:
                break
        text = body[:_ERROR_BODY_BYTES].decode(errors="replace").strip()
        return f"HTTP {response.status_code} {response.reason_phrase}".rstrip() + (f": {text}" if text else "")

    def _network(self, e: httpx.HTTPError) -> ToolFailure:
        return ToolFailure(self._name, "network", f"{type(e).__name__}: {e}".removesuffix(": "))


def _media_type(response: httpx.Response) -> str:
    try:
        return parse_media_type(response.headers.get("content-type", DEFAULT_MEDIA_TYPE))
    except BlobRefused:
        return DEFAULT_MEDIA_TYPE


# Signs the headers that identify run, tool call and tenant for an HTTP tool. Pure.
#
# ``Tokenbus-Run``        base64url of a JSON object: run, turn, tool_id, tool, tenant, metadata
# ``Tokenbus-Timestamp``  Unix time in seconds
# ``Tokenbus-Signature``  ``v1=`` and the HMAC-SHA256, in hex, of these lines joined by line feeds: ``v1``, the
#                         timestamp, the method, the request's target (path and query), ``Tokenbus-Run``; then a line
#                         feed and the body
#
# docs/guides/tools.md has a function that verifies it.

MAX_METADATA_BYTES = 4096
"""Servers limit the size of headers, mostly to 8 KiB."""
RUN, TIMESTAMP, SIGNATURE = "Tokenbus-Run", "Tokenbus-Timestamp", "Tokenbus-Signature"


def signed_headers(
    secret: str, context: ToolContext, *, tool: str, method: str, target: bytes, body: bytes, now_s: int
) -> dict[str, str]:
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


def signing_secret(settings: HttpTool, env: Mapping[str, str]) -> Secret | None:
    """The secret that signs the tool's calls; None if they are not signed. Raises ValueError."""
    if settings.signing_env is None:
        return None
    try:
        secret = Secret(settings.signing_env, env)
    except SettingsError as e:
        raise ValueError(f"signing_env: {e.where}: {e.problem}") from None
    if not secret:
        raise ValueError(f"signing_env: the environment has no {settings.signing_env}, nor {settings.signing_env}_FILE")
    return secret
