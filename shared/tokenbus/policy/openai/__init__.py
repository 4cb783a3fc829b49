"""Policies over chunks of the OpenAI Chat Completions SDK."""
