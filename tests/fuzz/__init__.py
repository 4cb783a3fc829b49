"""Coverage-guided fuzzing of the provider decoders: `make fuzz SECONDS=60`. What must hold is in `target.py`."""
