"""The queue of competing consumers."""
