"""Reads the text that a model continues (prefill mode) as blocks: tags, stop strings, calls. The grammar is
docs/guides/prefill.md's; how the text is written, is `tokenbus.providers.request.transcript`'s."""
