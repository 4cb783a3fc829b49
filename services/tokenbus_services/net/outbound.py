"""The settings of what this deployment calls, checked: its URL, the addresses that it may have, its headers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import httpx

from tokenbus.errors import SettingsError
from tokenbus.secret_env import Secret, header_problem
from tokenbus_services.net.egress import AddressRefused, Egress
from tokenbus_services.settings import Outbound

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


def egress_of(settings: Outbound) -> Egress:
    """Build its egress rules. Raises ValueError, also if the URL itself violates them."""
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


class Headers:
    """The configured headers, including secrets: of the environment, or of files, which are read again when they
    change.
    """

    def __init__(self, settings: Outbound, env: Mapping[str, str], learn: Learn | None = None) -> None:
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
        secrets = {header: secret.value for header, secret in self._secrets.items()}
        if self._learn:
            self._learn(secrets.values())
        return {**self._fixed, **secrets}
