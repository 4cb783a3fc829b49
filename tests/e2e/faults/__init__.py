"""Workers, servers and clocks that fail under running services."""
