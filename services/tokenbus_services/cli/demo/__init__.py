"""`tokenbus demo`: the main job in a minute, against the mock provider."""
