"""Webhooks: tells receivers how runs end, at least once, for as long as it takes."""
