"""Rate limits and concurrency limits of provider calls, and the fair queue in front of them.

The scripts that count live in `tokenbus.bus.scripts.limits`.
"""
