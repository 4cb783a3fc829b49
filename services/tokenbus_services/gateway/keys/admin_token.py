"""The admin API's token, in the environment of the gateways."""

from __future__ import annotations

from collections.abc import Mapping

from tokenbus.secret_env import Secret
from tokenbus_services.blobs.auth import secret_of
from tokenbus_services.settings.tables.gateway import AdminSettings


def admin_token(admin: AdminSettings, env: Mapping[str, str]) -> Secret:
    """Read the token; empty if there is none. Raises SettingsError if it is not valid in a header."""
    return secret_of(admin.token_env, env)
