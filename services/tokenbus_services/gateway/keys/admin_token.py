"""The admin API's token, in the environment of the gateways."""

from __future__ import annotations

from collections.abc import Mapping

from tokenbus_services.blobs.auth import token_of
from tokenbus_services.settings import BlobSettings
from tokenbus_services.settings.gateway_keys import AdminSettings


def admin_token(admin: AdminSettings, env: Mapping[str, str]) -> str:
    """Read the token; empty if there is none. Raises SettingsError if it is not valid in a header."""
    return token_of(BlobSettings(token_env=admin.token_env), env)
