"""More work than one worker or one limit has room for: fairness, back-pressure, scaling."""
