"""The chaos harness: hundreds of runs pass through real workers while faults hit everything around them, and an
independent judge checks the output. Start it with `make chaos`; docs/explain/chaos.md lists the faults and what is
judged.
"""
