"""The token of the blob service: one secret of the deployment, in the environment of each service."""

from __future__ import annotations

from collections.abc import Mapping
from hmac import compare_digest
from ipaddress import ip_address
from pathlib import Path

from tokenbus.errors import SettingsError
from tokenbus_services.settings import BlobSettings


def token_of(settings: BlobSettings, env: Mapping[str, str]) -> str:
    """The token; empty where there is none. Raises SettingsError for one that no header can hold."""
    name, path = settings.token_env, env.get(f"{settings.token_env}_FILE", "")
    token = env.get(name, "").strip()
    if path and token:
        raise SettingsError("environment", f"{name}_FILE", f"{name} is set too")
    if path:
        name, token = f"{name}_FILE", _read(f"{name}_FILE", path)
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise SettingsError("environment", name, "has characters that a header cannot hold")
    return token


def check_exposed(settings: BlobSettings, env: Mapping[str, str], address: str) -> None:
    """Raises SettingsError where a service without a token would listen on an address that others reach."""
    if not token_of(settings, env) and not ip_address(address.partition("%")[0]).is_loopback:
        raise SettingsError(
            "environment",
            settings.token_env,
            f"not set, so the blob service may listen on loopback alone, not on {address}: "
            "set a long random text there for each service",
        )


def admitted(authorization: bytes, token: str) -> bool:
    """Whether this Authorization header has the token. Takes as long for a wrong one as for the right one."""
    scheme, _, given = authorization.partition(b" ")
    return not token or (scheme.lower() == b"bearer" and compare_digest(given.strip(), token.encode()))


def _read(name: str, path: str) -> str:
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as e:
        raise SettingsError("environment", name, getattr(e, "strerror", None) or "no text") from None
    if not token:
        raise SettingsError("environment", name, "the file is empty")
    return token
