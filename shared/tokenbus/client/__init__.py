"""The light client: publish requests, follow runs, subscribe to topics, cancel runs. Depends only on msgspec and redis."""
