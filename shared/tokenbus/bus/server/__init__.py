"""The connection to Redis or Valkey: URLs, clients, scripts run by their SHA-1, retries, stream reads.

What the scripts mean lives in `tokenbus.bus.scripts`.
"""
