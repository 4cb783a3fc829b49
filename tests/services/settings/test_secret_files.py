"""Every secret that the settings name may be in a file, and running services take a new one from it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.services.settings.test_errors_everywhere import TABLES
from tests.unit.docs.pages import page, quoted, rows, sections
from tokenbus.bus.server.server import Server
from tokenbus.bus.server.url import parse_url, plain_url, url_in_env
from tokenbus.providers import registry
from tokenbus.secret_env import FILE, Secret
from tokenbus_services.blobs.auth import admitted, secret_of
from tokenbus_services.cli.up.command import withheld_from
from tokenbus_services.endpoints.endpoint import Key
from tokenbus_services.net.outbound import Headers
from tokenbus_services.redaction.known_secrets import secrets_of
from tokenbus_services.settings import (
    BlobSettings,
    HttpTool,
    McpHttp,
    McpStdio,
    Outbound,
    ProviderSettings,
    Settings,
    WebhookSettings,
)
from tokenbus_services.settings.tables.gateway import AdminSettings
from tokenbus_services.tools.http import signing_secret
from tokenbus_services.tools.tool import check_passed, passed_environment

Env = Mapping[str, str]
OLD, NEW = "sk-the-old-secret", "sk-the-new-secret"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are looked at whenever they are used."""
    monkeypatch.setattr("tokenbus.secret_env.POLL_S", 0.0)


def provider_key(env: Env) -> Callable[[], str]:
    key = Key("p", ProviderSettings(api="anthropic", api_key_env="X"), registry.get("anthropic"), env)
    return lambda: key.headers()["x-api-key"]


def header(settings: Outbound, env: Env) -> Callable[[], str]:
    headers = Headers(settings, env)
    return lambda: headers()["authorization"]


def passed(env: Env) -> Callable[[], str]:
    settings = McpStdio(command="x", env_pass=("X",))
    check_passed(settings.env_pass, env)
    return lambda: passed_environment(settings.env_pass, env)["X"]


def admin(env: Env) -> Callable[[], str]:
    token = secret_of(AdminSettings(token_env="X").token_env, env)
    return lambda: next(one for one in (NEW, OLD) if admitted(f"Bearer {one}".encode(), token))


def signing(env: Env) -> Callable[[], str]:
    secret = signing_secret(HttpTool(url="https://x", signing_env="X"), env)
    assert secret
    return lambda: secret.value


def hook(**fields: Any) -> WebhookSettings:
    return WebhookSettings(url="https://example.com/", **{"secret_env": "X", **fields})


def webhook(env: Env) -> Callable[[], str]:
    secret = Secret("X", env)
    return lambda: secret.value


def blob_token(env: Env) -> Callable[[], str]:
    token = secret_of(BlobSettings(token_env="X").token_env, env)
    return lambda: token.value


READERS: dict[str, Callable[[Env], Callable[[], str]]] = {
    "providers.NAME.api_key_env": provider_key,
    "blobs.token_env": blob_token,
    "gateway.admin.token_env": admin,
    "tools.NAME.header_env": lambda env: header(HttpTool(url="https://x", header_env={"authorization": "X"}), env),
    "tools.NAME.signing_env": signing,
    "mcp.NAME.header_env": lambda env: header(McpHttp(url="https://x", header_env={"authorization": "X"}), env),
    "mcp.NAME.env_pass": passed,
    "webhooks.NAME.header_env": lambda env: header(hook(header_env={"authorization": "X"}), env),
    "webhooks.NAME.secret_env": webhook,
}
"""How the services read each setting that names variables."""


def named() -> set[str]:
    """The settings that name variables of the environment."""
    return {
        ".".join("NAME" if part == "a name" else str(part) for part in (*path, field.encode_name))
        for path, table in TABLES
        for field in table.fields
        if re.search(r"(^|_)env(_|$)", field.encode_name)
    }


def test_every_setting_that_names_a_variable_is_tried_here() -> None:
    assert named() == set(READERS)


@pytest.mark.parametrize("setting", sorted(READERS))
def test_a_secret_in_a_file_is_used_and_so_is_its_replacement(setting: str, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(f"{OLD}\n")
    read = READERS[setting]({"X_FILE": str(file)})
    assert read() == OLD
    new = tmp_path / "new"
    new.write_text(f"{NEW}\n")
    new.replace(file)
    assert read() == NEW


@pytest.mark.parametrize("setting", sorted(READERS))
def test_a_secret_in_the_variable_is_used(setting: str) -> None:
    assert READERS[setting]({"X": OLD})() == OLD


def test_what_files_hold_is_kept_out_of_logs_and_files_of_provider_keys_reach_no_other_service(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(OLD)
    tool = HttpTool(url="https://x", header_env={"authorization": "ANY"})
    settings = Settings(
        tools={"t": tool},
        providers={
            "p": ProviderSettings(api="anthropic", api_key_env="MINE"),
            "q": ProviderSettings(api="gemini", api_key_env="ANY"),
        },
    )
    for variable in ("ANY", "MINE", "SOME_TOKEN", "TOKENBUS_REDIS_URL"):
        found = secrets_of(settings, {f"{variable}{FILE}": str(file)})
        assert OLD in found
        assert str(file) not in found
    assert {"MINE", "MINE_FILE"} <= withheld_from("parser", settings)
    assert {"ANY", "ANY_FILE"}.isdisjoint(withheld_from("tools", settings))


def test_every_variable_of_ours_with_a_secret_has_one_for_a_file_on_the_settings_page() -> None:
    documented = {quoted(name) for name, _, _ in rows(sections(page("reference/settings.md"))["Environment"])}
    secret = {name for name in documented if re.search(r"(PASSWORD|TOKEN|KEY|REDIS_URL)$", name)}
    text = page("reference/settings.md")
    assert len(secret) == 7
    for name in secret:
        assert f"{name}{FILE}" in text


@pytest.mark.parametrize("kind", ["password", "url"])
async def test_a_changed_password_of_the_server_is_used_by_the_next_connection(
    server: Server, server_url: str, tmp_path: Path, kind: str
) -> None:
    user, file = f"user-{uuid4().hex[:8]}", tmp_path / "secret"
    at = parse_url(server_url).nodes[0]

    def write(password: str) -> None:
        whole = f"redis://{user}:{password}@{at[0]}:{at[1]}"
        file.write_text(password if kind == "password" else whole)

    write("old")
    name = "TOKENBUS_REDIS_PASSWORD_FILE" if kind == "password" else "TOKENBUS_REDIS_URL_FILE"
    env = {name: str(file), **({"TOKENBUS_REDIS_URL": f"redis://{user}@{at[0]}:{at[1]}"} if kind == "password" else {})}
    url = url_in_env(env)
    assert url is not None
    assert "old" in plain_url(url)
    assert str(file) not in plain_url(url)
    await server.client.execute_command("ACL", "SETUSER", user, "on", ">old", "~*", "+@all")
    try:
        async with Server(url) as ours:
            await ours.client.ping()
            await server.client.execute_command("ACL", "SETUSER", user, "resetpass", ">new")
            write("new")
            await server.client.execute_command("CLIENT", "KILL", "USER", user)
            await ours.aclose()  # like a lost connection: the next command reconnects
            await ours.client.ping()
    finally:
        await server.client.execute_command("ACL", "DELUSER", user)
