"""The chaos harness: hundreds of runs through real workers while everything around them breaks, and an independent
judge of what came out. `make chaos`; docs/explain/chaos.md says what is broken and what is judged."""
