"""A generation request from its bytes: parsed, bounded and validated. Pure.

Provider bodies are built in `tokenbus.providers`.
"""
