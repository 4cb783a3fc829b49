"""Answers of the gateway: reads a run and writes it to a client, streamed or whole. The protocols are in `surfaces`."""
