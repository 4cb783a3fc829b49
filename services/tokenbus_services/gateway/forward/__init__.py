"""Requests that are no runs: a table of paths that go to their provider as they are, under the keys of the gateway."""
