"""The parser: normalised events become blocks, chunks and the life of a run.

The rules are in `tokenbus.core.run.state_machine`.
"""
