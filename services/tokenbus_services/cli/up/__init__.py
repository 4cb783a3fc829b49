"""`tokenbus up`: starts, watches and restarts the services of one machine."""
