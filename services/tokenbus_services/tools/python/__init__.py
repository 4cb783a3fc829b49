"""Tools that are Python functions: how they are found and called, and the executors in which they run."""
