"""Connection to Redis or Valkey: URLs, clients, scripts run by SHA-1, retries, stream reads.

The scripts are in `tokenbus.bus.scripts`.
"""
