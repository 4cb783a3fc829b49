"""The light client: publish requests, follow runs, subscribe to topics, cancel. Needs msgspec and redis alone."""
