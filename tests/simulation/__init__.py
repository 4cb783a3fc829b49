"""A model of the bus, fed with measured unit costs: what larger deployments need, and what breaks first.

- `engine`, `bus`: the discrete-event model. `costs`: what a turn, an item and a chunk cost each process.
- `calibrate`: measures unit costs and a small case with the real services; `measurement`: what it stores.
- `compare`: the model beside the measurement. `scale`: 10,000, 1 M and 50 M chunks/s.
"""
