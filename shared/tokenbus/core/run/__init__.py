"""State machine of one run, without IO: attempts, blocks, tool turns, retries, policies, termination.

`tokenbus.core.attempt_decoder` decodes a provider's stream.
"""
