"""The life of one run: attempts, blocks, tool turns, retries, policies, its end. A state machine without IO.

Decoding a provider's stream is `tokenbus.core.attempt_decoder`.
"""
