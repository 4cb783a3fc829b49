"""Durable Streams (protocol 1.0), for reading: a run's log as a stream of JSON messages, with offsets. Pure."""
