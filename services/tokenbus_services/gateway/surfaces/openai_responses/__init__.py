"""OpenAI's Responses API: a request translator, and encoders of its event stream. Pure."""
