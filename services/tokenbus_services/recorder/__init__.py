"""Debug records: created for selected runs, and replayed. Intake selects; other runs have no overhead."""
