"""Parts of provider answers that several APIs share: SSE, JSON, errors, usage, repeats.

Each API decodes its stream in a room of its own.
"""
