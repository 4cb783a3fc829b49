"""All settings as one typed object, read once at startup: `tokenbus.toml`, then the environment.

The settings never contain provider keys; they name the variable (`api_key_env`) or file (`api_key_file`).
"""

from __future__ import annotations

from tokenbus_services.settings.file import Settings, load, read_file
from tokenbus_services.settings.tables.gateway import (
    CONSOLE_ROLES,
    ConsoleRole,
    ConsoleSettings,
    GatewaySettings,
    SurfaceName,
)
from tokenbus_services.settings.tables.limits import LimitSettings, ProviderRates, RateSettings
from tokenbus_services.settings.tables.providers import (
    DEFAULT_PROVIDERS,
    FallbackChoice,
    FallbackRoute,
    MediaSettings,
    ProviderSettings,
    QuirkSettings,
    UploadSettings,
)
from tokenbus_services.settings.tables.retention import BlobSettings, RecordSettings, RetentionSettings
from tokenbus_services.settings.tables.tools import (
    DEFAULT_TOOL_TIMEOUT_S,
    HttpTool,
    McpHttp,
    McpSettings,
    McpStdio,
    PolicyRoute,
    PolicySettings,
    PythonTool,
    ToolSettings,
)
from tokenbus_services.settings.tables.workers import HttpSettings, OtelSettings, RetrySettings, StageSettings

__all__ = [
    "CONSOLE_ROLES",
    "DEFAULT_PROVIDERS",
    "DEFAULT_TOOL_TIMEOUT_S",
    "BlobSettings",
    "ConsoleRole",
    "ConsoleSettings",
    "FallbackChoice",
    "FallbackRoute",
    "GatewaySettings",
    "HttpSettings",
    "HttpTool",
    "LimitSettings",
    "McpHttp",
    "McpSettings",
    "McpStdio",
    "MediaSettings",
    "OtelSettings",
    "PolicyRoute",
    "PolicySettings",
    "ProviderRates",
    "ProviderSettings",
    "PythonTool",
    "QuirkSettings",
    "RateSettings",
    "RecordSettings",
    "RetentionSettings",
    "RetrySettings",
    "Settings",
    "StageSettings",
    "SurfaceName",
    "ToolSettings",
    "UploadSettings",
    "load",
    "read_file",
]
