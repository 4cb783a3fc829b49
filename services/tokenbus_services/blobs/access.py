"""The token of the blob service: one secret of the deployment, in the environment of each service."""

from __future__ import annotations

from collections.abc import Mapping
from hmac import compare_digest

from tokenbus.errors import SettingsError
from tokenbus_services.settings import BlobSettings


def token_of(settings: BlobSettings, env: Mapping[str, str]) -> str:
    """The token; empty where there is none. Raises SettingsError for one that no header can hold."""
    token = env.get(settings.token_env, "").strip()
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise SettingsError("environment", settings.token_env, "has characters that a header cannot hold")
    return token


def admitted(authorization: bytes, token: str) -> bool:
    """Whether this Authorization header has the token. Takes as long for a wrong one as for the right one."""
    scheme, _, given = authorization.partition(b" ")
    return not token or (scheme.lower() == b"bearer" and compare_digest(given.strip(), token.encode()))
