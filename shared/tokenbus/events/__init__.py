"""Everything that travels on the bus: requests, public events, normalized events, frames. Data only, no behavior, no
IO.
"""
