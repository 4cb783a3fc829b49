"""The settings of an endpoint, checked: its URL, the addresses it may have, its headers, its signing secret."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import httpx

from tokenbus.errors import SettingsError
from tokenbus.secret_env import Secret, header_problem
from tokenbus_services.net.egress import AddressRefused, Egress
from tokenbus_services.settings import HttpTool, McpHttp

Learn = Callable[[Iterable[str]], None]
"""Takes secrets, to remove them from results, errors and logs."""


def endpoint_url(text: str) -> httpx.URL:
    """Parse a URL from the settings. Raises ValueError."""
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as e:
        raise ValueError(f"url: {e}") from None
    if url.scheme not in {"http", "https"} or not url.host:
        raise ValueError("url: must start with http:// or https:// and include a host")
    return url


def egress_of(settings: HttpTool | McpHttp) -> Egress:
    """Build the egress rules of a tool. Raises ValueError, also if the URL itself violates them."""
    try:
        egress = Egress(allow_private=settings.allow_private, allow_networks=settings.allow_networks)
    except ValueError as e:
        raise ValueError(f"allow_networks: {e}") from None
    try:
        egress.check_literal(endpoint_url(settings.url).host)
    except AddressRefused as e:
        way = "allow_private = true" if e.kind in ("loopback", "private") else "a network in allow_networks"
        raise ValueError(f"url: {e}: {way} would allow it") from None
    return egress


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


class Headers:
    """The configured headers, including secrets: of the environment, or of files, which are read again when they
    change.
    """

    def __init__(self, settings: HttpTool | McpHttp, env: Mapping[str, str], learn: Learn | None = None) -> None:
        """Raises ValueError if one is invalid or missing."""
        self._fixed = dict(settings.headers)
        self._secrets: dict[str, Secret] = {}
        self._learn = learn
        for header, variable in settings.header_env.items():
            try:
                secret = Secret(variable, env, check=header_problem)
            except SettingsError as e:
                raise ValueError(f"header_env.{header}: {e.where}: {e.problem}") from None
            if not secret:
                raise ValueError(f"header_env.{header}: the environment has no {variable}, nor {variable}_FILE")
            self._secrets[header] = secret
        for header, value in self().items():
            # The value may be a secret and is not shown.
            if not (header.isascii() and header.replace("-", "").replace("_", "").isalnum()):
                raise ValueError(f"{header!r} is not a valid header name")
            if problem := header_problem(value):
                raise ValueError(f"header {header}: the value {problem}")

    def __call__(self) -> dict[str, str]:
        """The headers as they are now."""
        secrets = {header: secret.value for header, secret in self._secrets.items()}
        if self._learn:
            self._learn(secrets.values())
        return {**self._fixed, **secrets}
