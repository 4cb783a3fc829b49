"""Tools that are Python functions: how they are found and called, and the threads of those that are synchronous."""
