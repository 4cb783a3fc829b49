"""Sessions, through the running services."""
