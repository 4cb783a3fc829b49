"""Rate limits and concurrency limits of provider calls, and the fair queue in front of them.

The counting scripts are in `tokenbus.bus.scripts.limits`.
"""
