"""The parser: turns normalised events into blocks, chunks and run lifecycles.

The rules are in `tokenbus.core.run.state_machine`.
"""
