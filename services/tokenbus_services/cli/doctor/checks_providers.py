"""The checks of `tokenbus doctor` on the settings of providers: their keys and addresses. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tokenbus.errors import SettingsError
from tokenbus.providers import registry
from tokenbus_services.cli.doctor.checks import Finding
from tokenbus_services.redaction.redactor import key_in_file
from tokenbus_services.settings import DEFAULT_PROVIDERS, Settings


def check_providers(settings: Settings, env: Mapping[str, str]) -> Iterator[Finding]:
    """Check that each provider's key is in this environment. Names variables, never their values."""
    for name, provider in sorted(settings.providers.items()):
        meant = provider is not DEFAULT_PROVIDERS.get(name)
        about = f"provider {name}"
        try:
            api = registry.get(provider.api)
        except SettingsError as e:
            if meant:
                yield Finding(level="wrong", about=about, says=e.problem, todo="choose another api")
            continue
        variable = api.default_key_env if provider.api_key_env is None else provider.api_key_env
        path = provider.api_key_file or (env.get(f"{variable}_FILE") if variable else None)
        if provider.auth:
            yield Finding(level="ok", about=about, says=f"is authorised by {provider.auth}")
        elif path:
            there = bool(key_in_file(path))
            todo = None if there else "put the key there, alone, readable for this user"
            says = f"{path} holds {'a' if there else 'no'} key"
            yield Finding(level="ok" if there else "wrong", about=about, says=says, todo=todo or "")
        elif not variable:
            yield Finding(level="ok", about=about, says="needs no key")
        elif env.get(variable):
            yield Finding(level="ok", about=about, says=f"{variable} holds a key")
        else:
            yield Finding(
                level="wrong" if meant else "note",
                about=about,
                says=f"{variable} holds no key here",
                todo=f"set {variable} where fetchers run, to use this provider",
            )


def check_reach(name: str, url: str, *, problem: str | None) -> Finding:
    """``problem``: why the provider's address did not answer at all; None if it gave any answer."""
    about = f"provider {name}"
    if problem is None:
        return Finding(level="ok", about=about, says=f"answers at {url}")
    todo = "fix base_url, or check this machine's name service, firewall and proxy"
    return Finding(level="wrong", about=about, says=f"no answer from {url}: {problem}", todo=todo)
