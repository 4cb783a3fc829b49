"""The blob service's token: one secret of the deployment, in each service's environment."""

from __future__ import annotations

from collections.abc import Mapping
from hmac import compare_digest
from ipaddress import ip_address

from tokenbus.errors import SettingsError
from tokenbus.secret_env import Secret, token_problem
from tokenbus_services.settings import BlobSettings


def secret_of(name: str, env: Mapping[str, str]) -> Secret:
    """The token in this variable, or in the file that the variable with `_FILE` names; empty if neither is set.

    Raises SettingsError if it is not valid in a header.
    """
    return Secret(name, env, check=token_problem)


def token_of(settings: BlobSettings, env: Mapping[str, str]) -> str:
    """Read the token; empty if there is none. Raises SettingsError if it is not valid in a header."""
    return secret_of(settings.token_env, env).value


def check_exposed(settings: BlobSettings, env: Mapping[str, str], address: str) -> None:
    """Raise SettingsError if a service without a token would listen on a non-loopback address."""
    if not token_of(settings, env) and not ip_address(address.partition("%")[0]).is_loopback:
        raise SettingsError(
            "environment",
            settings.token_env,
            f"not set, so the blob service may listen only on loopback, not on {address}: "
            "set a long random text there for each service",
        )


def admitted(authorization: bytes, token: str | Secret) -> bool:
    """Whether this Authorization header has the token, or a secret's token of a moment ago. Runs in constant time
    for each.
    """
    if not token:
        return True
    scheme, _, given = authorization.partition(b" ")
    if scheme.lower() != b"bearer":
        return False
    tokens = (token,) if isinstance(token, str) else token.accepted()
    return any(compare_digest(given.strip(), one.encode()) for one in tokens)
