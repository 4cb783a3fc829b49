"""Subscriptions to topics: ordered or in groups, acknowledged, filtered, or cut into sentences.

To follow a single run, see `tokenbus.client.log_reader`.
"""
