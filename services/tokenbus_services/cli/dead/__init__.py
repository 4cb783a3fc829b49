"""`tokenbus dead`: lists, shows, retries and drops dead letters."""
