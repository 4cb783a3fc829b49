"""All settings as one typed object, read once at startup: `tokenbus.toml`, then the environment.

The settings never contain provider keys; they name the variable (`api_key_env`) or file (`api_key_file`).
"""

from __future__ import annotations

from tokenbus_services.settings.file import Settings, load, read_file, wrong_values
from tokenbus_services.settings.tables.gateway import (
    CONSOLE_ROLES,
    ConsoleRole,
    ConsoleSettings,
    GatewaySettings,
    SurfaceName,
)
from tokenbus_services.settings.tables.limits import (
    ArchiveSettings,
    BlobSettings,
    DurabilitySettings,
    LimitSettings,
    ProviderRates,
    RateSettings,
    RecordSettings,
    RetentionSettings,
)
from tokenbus_services.settings.tables.providers import (
    DEFAULT_PROVIDERS,
    FallbackChoice,
    FallbackRoute,
    MediaSettings,
    ProviderSettings,
    QuirkSettings,
    UploadSettings,
)
from tokenbus_services.settings.tables.workers import (
    DEFAULT_TOOL_TIMEOUT_S,
    ClientTool,
    HttpSettings,
    HttpTool,
    McpHttp,
    McpSettings,
    McpStdio,
    OtelSettings,
    Outbound,
    PolicyRoute,
    PolicySettings,
    PythonTool,
    RetrySettings,
    RunTool,
    StageSettings,
    ToolSettings,
    WebhookSettings,
)

__all__ = [
    "CONSOLE_ROLES",
    "DEFAULT_PROVIDERS",
    "DEFAULT_TOOL_TIMEOUT_S",
    "ArchiveSettings",
    "BlobSettings",
    "ClientTool",
    "ConsoleRole",
    "ConsoleSettings",
    "DurabilitySettings",
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
    "Outbound",
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
    "RunTool",
    "Settings",
    "StageSettings",
    "SurfaceName",
    "ToolSettings",
    "UploadSettings",
    "WebhookSettings",
    "load",
    "read_file",
    "wrong_values",
]
