"""The tool executor: runs the tools declared in the settings. Every call produces a result, even if it fails.

The parser decides which calls to run and what happens to their results; the bus transports them.
"""
