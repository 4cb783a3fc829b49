"""`tokenbus keys`: makes, lists and revokes keys of the gateway."""
