"""Policies over OpenAI Chat Completions chunks."""
