"""Response parts that several APIs share: SSE framing, JSON, errors, usage, duplicate detection.

Each API decodes its stream in its own package.
"""
