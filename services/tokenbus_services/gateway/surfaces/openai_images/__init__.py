"""OpenAI's Images API: a prompt in, images out. Pure."""
