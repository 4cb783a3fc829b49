"""Anthropic's Messages API: `POST /v1/messages`, for clients of both header generations."""

from tokenbus_services.gateway.surfaces.anthropic_messages.surface import (
    AnthropicMessagesSurface,
    model_answer,
    models_answer,
)

__all__ = ["AnthropicMessagesSurface", "model_answer", "models_answer"]
