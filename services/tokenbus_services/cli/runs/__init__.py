"""Commands about runs: send, follow, list, cancel, tail."""
