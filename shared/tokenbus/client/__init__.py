"""The light client: publish requests, follow runs, subscribe to topics, cancel runs. Needs only msgspec and redis."""
