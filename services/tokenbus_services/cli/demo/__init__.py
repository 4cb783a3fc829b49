"""`tokenbus demo`: one request through the whole bus, against the mock provider."""
