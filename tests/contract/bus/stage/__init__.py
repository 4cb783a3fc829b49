"""The ordered stage, on the toy of `tests.contract.bus.toys`."""
