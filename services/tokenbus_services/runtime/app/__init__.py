"""The FastStream app around a service: its lifespan and HTTP pages, and the subscriber that reads through the bus.
The rules of a service are in its own room.
"""
