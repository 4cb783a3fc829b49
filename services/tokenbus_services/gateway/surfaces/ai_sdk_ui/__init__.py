"""The UI message stream of the AI SDK, for `useChat` of its versions 5 to 7."""

from tokenbus_services.gateway.surfaces.ai_sdk_ui.surface import AiSdkUiSurface

__all__ = ["AiSdkUiSurface"]
