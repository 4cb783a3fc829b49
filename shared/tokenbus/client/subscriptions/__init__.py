"""Subscriptions to topics: in order or in groups, acknowledged, filtered, cut into sentences.

Following one run is `tokenbus.client.run_log`.
"""
