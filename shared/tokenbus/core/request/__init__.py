"""Parse a generation request from bytes, check its bounds and validate it. Pure.

Provider bodies are built in `tokenbus.providers`.
"""
