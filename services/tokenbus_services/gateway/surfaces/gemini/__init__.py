"""The Gemini API: `models/M:generateContent` and `models/M:streamGenerateContent`."""

from tokenbus_services.gateway.surfaces.gemini.request import KEY_IN_URL, METHODS
from tokenbus_services.gateway.surfaces.gemini.surface import GeminiArray, GeminiSurface, model_answer, models_answer

__all__ = ["KEY_IN_URL", "METHODS", "GeminiArray", "GeminiSurface", "model_answer", "models_answer"]
