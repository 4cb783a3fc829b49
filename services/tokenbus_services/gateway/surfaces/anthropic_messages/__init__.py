"""Anthropic's Messages API: `POST /v1/messages`, for clients of both header generations."""

from tokenbus_services.gateway.surfaces.anthropic_messages.surface import AnthropicMessages, model_answer, models_answer

__all__ = ["AnthropicMessages", "model_answer", "models_answer"]
