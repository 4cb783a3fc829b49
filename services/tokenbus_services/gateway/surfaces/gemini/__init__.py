"""The Gemini API: `models/M:generateContent` and `models/M:streamGenerateContent`."""

from tokenbus_services.gateway.surfaces.gemini.request import METHODS
from tokenbus_services.gateway.surfaces.gemini.surface import Gemini, GeminiArray, model_answer, models_answer

__all__ = ["METHODS", "Gemini", "GeminiArray", "model_answer", "models_answer"]
