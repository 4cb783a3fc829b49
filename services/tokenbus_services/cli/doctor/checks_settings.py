"""The checks of `tokenbus check` and `doctor` on what the settings name: modules, names, ports, addresses, secrets.

User modules are imported, as the services do, and may do anything then. Nothing is called, sent or written.
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import httpx
import msgspec

from tokenbus.bus.server.server import parse_url
from tokenbus.core.nearest_name import nearest
from tokenbus.errors import SettingsError
from tokenbus.policy.loading import PolicySpec, load
from tokenbus.providers import registry
from tokenbus.secret_env import FILE
from tokenbus_services.blobs.archive_keys import KEY_SUFFIX, TenantKeys
from tokenbus_services.blobs.auth import check_exposed, secret_of, token_of
from tokenbus_services.blobs.client import check_loader
from tokenbus_services.cli import mock
from tokenbus_services.cli.doctor.checks import Finding
from tokenbus_services.cli.service_registry import ServiceName, services_of
from tokenbus_services.endpoints.endpoint import auth_of
from tokenbus_services.gateway.app import model_table
from tokenbus_services.gateway.callers import check_exposed as check_gateway_exposed
from tokenbus_services.settings import (
    ClientTool,
    HttpTool,
    McpHttp,
    McpSettings,
    McpStdio,
    ProviderSettings,
    RunTool,
    Settings,
    ToolSettings,
)
from tokenbus_services.settings.file import add_settings_directory_to_path
from tokenbus_services.tools.executor import ToolRegistry
from tokenbus_services.weather import WEATHER_TOOL

Env = Mapping[str, str]
_PLACEHOLDER = "a-value-that-is-not-set-here"
_OBJECT_STORES = ("file", "memory", "s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "http", "https")


def check_settings(settings: Settings, env: Env) -> Iterator[Finding]:
    add_settings_directory_to_path(env)
    yield from _tools(settings, env)
    yield from _policies(settings)
    yield from _blobs(settings, env)
    yield from _archive(settings)
    yield from _providers(settings, env)
    yield from _server(settings)
    yield from _gateway(settings, env)
    yield from _names(settings)
    yield from _ports(settings)


def _wrong(about: str, says: str, todo: str) -> Finding:
    return Finding(level="wrong", about=about, says=says, todo=todo)


def _tried(about: str, attempt: Callable[[], object], *, ok: str, todo: str) -> Iterator[Finding]:
    try:
        attempt()
    except SettingsError as e:
        yield _wrong(about, f"{e.where}: {e.problem}", todo)
    except Exception as e:  # user modules may raise anything
        yield _wrong(about, f"{type(e).__name__}: {e}", todo)
    else:
        yield Finding(level="ok", about=about, says=ok)


# --- modules -------------------------------------------------------------------------------------------------------


def _tools(settings: Settings, env: Env) -> Iterator[Finding]:
    for name, tool in settings.tools.items():
        about, variables = f"tool {name}", _variables(tool)
        yield from _missing(about, variables, env)
        given = _given(variables, env)
        one: dict[str, ToolSettings] = {name: tool}

        def declare(one: dict[str, ToolSettings] = one, given: Env = given) -> object:
            return ToolRegistry(one, env=given)

        match tool:
            case HttpTool():
                says = f"calls {tool.url}"
            case ClientTool():
                says = "a client returns the results"
            case RunTool():
                says = f"begins runs of {tool.model} at {tool.provider}"
            case _:
                says = f"{tool.call} can be called"
        yield from _tried(about, declare, ok=says, todo="fix the table, or what it names")
    for name, server in settings.mcp.items():
        about = f"mcp {name}"
        yield from _missing(about, _variables(server), env)
        given = _given(_variables(server), env)
        one_server: dict[str, McpSettings] = {name: server}

        def connect(one: dict[str, McpSettings] = one_server, given: Env = given) -> object:
            return ToolRegistry({}, one, env=given)

        if isinstance(server, McpStdio) and shutil.which(server.command, path=env.get("PATH")) is None:
            says = f"no program {server.command!r} is found here"
            yield Finding(level="note", about=about, says=says, todo="install it where the tool executors run")
            continue
        says = f"would start {server.command}" if isinstance(server, McpStdio) else f"would ask {server.url}"
        yield from _tried(about, connect, ok=says, todo="fix the table, or what it names")


def _variables(tool: ToolSettings | McpSettings) -> list[str]:
    match tool:
        case HttpTool():
            return [*tool.header_env.values(), *([tool.signing_env] if tool.signing_env else [])]
        case McpHttp():
            return [*tool.header_env.values()]
        case McpStdio():
            return [*tool.env_pass]
        case _:
            return []


def _given(variables: list[str], env: Env) -> Env:
    """The environment with a value for each variable, so that the rest can be checked."""
    return {**env, **{name: _PLACEHOLDER for name in variables if _is_missing(name, env)}}


def _is_missing(name: str, env: Env) -> bool:
    return name not in env and not env.get(f"{name}{FILE}")


def _missing(about: str, variables: list[str], env: Env) -> Iterator[Finding]:
    """Report variables that are not set here; they may be set where the service runs."""
    for name in filter(lambda name: _is_missing(name, env), variables):
        says = f"{name} is not set here, nor {name}{FILE}"
        yield Finding(level="note", about=about, says=says, todo=f"set {name} where the tool executors run")


def _policies(settings: Settings) -> Iterator[Finding]:
    for name, policy in settings.policies.items():
        spec = PolicySpec(policy=policy.use, options=policy.options, on_error=policy.on_error, name=name)
        yield from _tried(
            f"policy {name}",
            lambda spec=spec: load(spec),
            ok=f"{policy.use} can be used",
            todo="fix the table, or what it names",
        )


def _blobs(settings: Settings, env: Env) -> Iterator[Finding]:
    blobs = settings.blobs
    if blobs.loader:
        loader = blobs.loader
        ok = f"{loader} can be called"
        yield from _tried("blob loader", lambda: check_loader(loader, env), ok=ok, todo="fix blobs.loader")
    if blobs.url is not None and (scheme := blobs.url.partition(":")[0]) not in _OBJECT_STORES:
        close = nearest(scheme, _OBJECT_STORES)
        says = f"blobs.url: no object store is reached by {scheme!r}" + (f"; did you mean {close!r}?" if close else "")
        yield _wrong("blob store", says, f"take one of {', '.join(_OBJECT_STORES)}")
    yield from _problem("blob token", lambda: token_of(blobs, env), todo="fix the token, or its file")
    if not blobs.loader and (address := _literal(settings.http.host)):
        todo = f"set {blobs.token_env} for every service"
        for finding in _problem("blob token", lambda: check_exposed(blobs, env, address), todo=todo):
            yield msgspec.structs.replace(finding, level="note")  # it may be set where the services run


def _archive(settings: Settings) -> Iterator[Finding]:
    if settings.archive is None or settings.archive.keys is None:
        return
    directory = Path(settings.archive.keys)
    if not directory.is_dir():  # a secret of the blob service, which these need not see
        says = f"archive.keys: {directory} is not here"
        yield Finding(level="note", about="archive keys", says=says, todo="mount it where the blob service runs")
        return
    tenants = sorted(path.name.removesuffix(KEY_SUFFIX) for path in directory.glob(f"*{KEY_SUFFIX}"))
    ok = f"can be used, of {', '.join(tenants) or 'no tenant: no log is sealed'}"
    yield from _tried("archive keys", lambda: TenantKeys(directory), ok=ok, todo="see docs/operate/archive.md#keys")


def _providers(settings: Settings, env: Env) -> Iterator[Finding]:
    for name, provider in settings.providers.items():
        about = f"provider {name}"
        with suppress(SettingsError):  # an API that cannot be loaded is reported with the provider's key
            url = provider.base_url or registry.get(provider.api).default_base_url
            yield from _problem(about, lambda url=url: httpx.URL(url), todo="fix base_url")
        if provider.auth:
            yield from _problem(about, lambda n=name, p=provider: auth_of(n, p, env), todo="fix auth, or what it names")


def _server(settings: Settings) -> Iterator[Finding]:
    if url := settings.redis_url:
        yield from _problem("redis_url", lambda: parse_url(url), todo="fix the address")


def _gateway(settings: Settings, env: Env) -> Iterator[Finding]:
    table = settings.gateway
    if table is None:
        return
    yield from _problem("gateway", lambda: model_table(_with_mocks(settings), table), todo="fix gateway.aliases")
    named = {choice.partition("/")[0] for choices in table.aliases.values() for choice in choices}
    if mocks := sorted((named & {*mock.provider_names()}) - {*settings.providers}):
        says = f"gateway.aliases name {', '.join(mocks)}, which only `up --mock` has"
        yield Finding(level="note", about="gateway", says=says, todo="without --mock, name providers of your own there")
    if address := _literal(settings.http.host):
        yield from _problem(
            "gateway", lambda: check_gateway_exposed(settings, address), todo="set gateway.require_keys"
        )
    if admin := table.admin:
        yield from _problem("gateway", lambda: secret_of(admin.token_env, env), todo="fix the token, or its file")
        if not env.get(admin.token_env) and not env.get(f"{admin.token_env}{FILE}"):
            says = f"{admin.token_env} is not set here, without which the admin API does not start"
            yield Finding(level="note", about="gateway", says=says, todo=f"set {admin.token_env} where gateways run")


def _with_mocks(settings: Settings) -> Settings:
    """The settings with the names that `tokenbus up --mock` adds: the gateway's guide has them in its first example."""
    mocks = {name: ProviderSettings(api="anthropic", api_key_env="") for name in mock.provider_names()}
    return msgspec.structs.replace(settings, providers={**mocks, **settings.providers})


def _problem(about: str, attempt: Callable[[], object], *, todo: str) -> Iterator[Finding]:
    return (finding for finding in _tried(about, attempt, ok="", todo=todo) if finding.level != "ok")


# --- names and ports -----------------------------------------------------------------------------------------------


def _names(settings: Settings) -> Iterator[Finding]:
    """Names that point nowhere, though nothing fails of it: a rule with such a name never applies."""
    providers, policies, tools = set(settings.providers), set(settings.policies), set(settings.tools)
    named: list[tuple[str, str, tuple[str, ...], set[str]]] = []
    routes = (("policy_routes", settings.policy_routes), ("fallback_routes", settings.fallback_routes))
    for table, rules in routes:
        named += [(f"{table}[{i}].providers", "provider", rule.providers, providers) for i, rule in enumerate(rules)]
    if settings.records:
        named.append(("records.providers", "provider", settings.records.providers, providers))
    if table := settings.gateway:
        models = tuple(model.partition("/")[0] for model in table.models)
        named.append(("gateway.models", "provider", models, providers))
        if not settings.mcp:  # else it may be a tool of a server
            named.append(("gateway.tools", "tool", tuple(t for t in table.tools if t != "*"), {*tools, WEATHER_TOOL}))
        for key, rules_of_key in table.keys.items():
            named.append((f"gateway.keys.{key}.policies", "policy", rules_of_key.policies, policies))
    for where, what, names, known in named:
        for name in names:
            if name not in known and not name.startswith("mock-"):
                close = nearest(name, known)
                says = f"{where}: no {what} is called {name!r}" + (f"; did you mean {close!r}?" if close else "")
                yield Finding(level="wrong", about="names", says=says, todo=f"fix the name, or add the {what}")


def _ports(settings: Settings) -> Iterator[Finding]:
    used: dict[int, str] = {}
    ports = {f"http.{name}": port_of(settings, name) for name in services_of(settings)}
    if settings.gateway and settings.gateway.admin:
        ports["gateway.admin.port"] = settings.gateway.admin.port
    for where, port in ports.items():
        if not 0 <= port <= 65_535:
            yield _wrong("ports", f"{where}: {port} is not 0 to 65535", "choose another, or 0 for any free one")
        elif port and port in used:
            says = f"{where} and {used[port]} are both {port}: on one machine only one of the services starts"
            yield _wrong("ports", says, "choose another, or 0 for any free one")
        used.setdefault(port, where)


def port_of(settings: Settings, service: ServiceName) -> int:
    """The port of a service's pages."""
    return int(msgspec.to_builtins(settings.http)[service])


def _literal(host: str) -> str | None:
    """The host if it is an address; None for a name, which only the machine of the service can resolve."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError):
            socket.inet_pton(family, host)
            return host
    return None
