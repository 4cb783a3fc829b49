"""AWS Signature Version 4, for Bedrock: keys from AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from urllib.parse import parse_qsl, quote, urlsplit

from tokenbus.providers import CallToSign


def bedrock(region: str) -> SigV4:
    """`auth = "sigv4:bedrock"` with `auth_options = { region = "us-east-1" }`."""
    return SigV4(region, "bedrock", os.environ, lambda: datetime.now(UTC))


class SigV4:
    """https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-create-signed-request.html"""

    needs_body = True

    def __init__(self, region: str, service: str, env: Mapping[str, str], now: Callable[[], datetime]) -> None:
        self._scope = f"{region}/{service}/aws4_request"
        self._env = env
        self._now = now

    @property
    def secrets(self) -> Collection[str]:
        return [self._env.get(name, "") for name in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")]

    def rejected(self) -> bool:
        return False  # signing again with the same keys changes nothing

    async def headers(self, call: CallToSign) -> Mapping[str, str]:
        url, at = urlsplit(call.url), self._now().strftime("%Y%m%dT%H%M%SZ")
        added = {"x-amz-date": at}
        if token := self._env.get("AWS_SESSION_TOKEN"):
            added["x-amz-security-token"] = token
        signed = {"host": url.netloc, **added}
        names = ";".join(sorted(signed))
        pairs = sorted(parse_qsl(url.query, keep_blank_values=True))
        canonical = [
            call.method,
            quote(url.path or "/", safe="/-_.~"),
            "&".join(f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}" for name, value in pairs),
            *(f"{name}:{signed[name]}" for name in sorted(signed)),
            "",
            names,
            hashlib.sha256(call.body or b"").hexdigest(),
        ]
        scope = f"{at[:8]}/{self._scope}"
        digest = hashlib.sha256("\n".join(canonical).encode()).hexdigest()
        key = f"AWS4{self._env['AWS_SECRET_ACCESS_KEY']}".encode()
        for part in scope.split("/"):
            key = hmac.digest(key, part.encode(), "sha256")
        signature = hmac.digest(key, f"AWS4-HMAC-SHA256\n{at}\n{scope}\n{digest}".encode(), "sha256").hex()
        credential = f"{self._env['AWS_ACCESS_KEY_ID']}/{scope}"
        parameters = f"Credential={credential}, SignedHeaders={names}, Signature={signature}"
        return {**added, "authorization": f"AWS4-HMAC-SHA256 {parameters}"}
