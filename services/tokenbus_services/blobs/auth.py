"""The blob service's token: one secret of the deployment, in each service's environment."""

from __future__ import annotations

from collections.abc import Mapping
from hmac import compare_digest
from ipaddress import ip_address
from pathlib import Path

from tokenbus.errors import SettingsError
from tokenbus_services.settings import BlobSettings


def token_of(settings: BlobSettings, env: Mapping[str, str]) -> str:
    """Read the token; empty if there is none. Raises SettingsError if it is not valid in a header."""
    name, path = settings.token_env, env.get(f"{settings.token_env}_FILE", "")
    token = env.get(name, "").strip()
    if path and token:
        raise SettingsError("environment", f"{name}_FILE", f"{name} is also set")
    if path:
        name, token = f"{name}_FILE", _read(f"{name}_FILE", path)
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise SettingsError("environment", name, "contains characters that are not allowed in a header")
    return token


def check_exposed(settings: BlobSettings, env: Mapping[str, str], address: str) -> None:
    """Raise SettingsError if a service without a token would listen on a non-loopback address."""
    if not token_of(settings, env) and not ip_address(address.partition("%")[0]).is_loopback:
        raise SettingsError(
            "environment",
            settings.token_env,
            f"not set, so the blob service may listen only on loopback, not on {address}:  "
            "set a long random text there for each service",
        )


def admitted(authorization: bytes, token: str) -> bool:
    """Whether this Authorization header has the token. Runs in constant time."""
    scheme, _, given = authorization.partition(b" ")
    return not token or (scheme.lower() == b"bearer" and compare_digest(given.strip(), token.encode()))


def _read(name: str, path: str) -> str:
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as e:
        raise SettingsError("environment", name, getattr(e, "strerror", None) or "not a text file") from None
    if not token:
        raise SettingsError("environment", name, "the file is empty")
    return token
