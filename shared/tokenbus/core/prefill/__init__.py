"""Parse the text that a model continues (prefill mode) into blocks: tags, stop strings, calls.

docs/guides/prefill.md defines the grammar; `tokenbus.providers.request.transcript` writes the text.
"""
