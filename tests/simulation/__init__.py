"""A model of the bus with measured unit costs: what larger deployments need, and what saturates first.

- `engine`, `bus`: the discrete-event model. `costs`: the cost of a turn, an item and a chunk for each process.
- `calibrate`: measures unit costs and a small case with the real services; `measurement`: the stored results.
- `compare`: the model beside the measurement. `scale`: 10,000, 1 M and 50 M chunks/s.
"""
