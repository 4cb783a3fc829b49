"""The console: pages that show runs as they happen, and their API. Served by the gateway; it reads, and acts by the
client's calls alone.
"""
