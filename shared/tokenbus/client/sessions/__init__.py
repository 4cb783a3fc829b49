"""Sessions: appends, and a reader with one order over all runs of a session."""
