"""How many readers wait for new entries of their streams on a few connections.
What they do with the entries is in `tokenbus.client.log_reader` and `tokenbus.client.subscriptions`.
"""
