"""The services, unmodified, in virtual time against a real server, under faults that a seed chooses."""
