"""OpenAI's Chat Completions: `POST /v1/chat/completions`, streamed and whole."""

from tokenbus_services.gateway.surfaces.openai_chat.surface import OpenAIChatSurface

__all__ = ["OpenAIChatSurface"]
