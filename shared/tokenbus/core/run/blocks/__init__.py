"""Blocks of a run: the numbering of a provider's regions, the rules of public blocks, opaque data."""
