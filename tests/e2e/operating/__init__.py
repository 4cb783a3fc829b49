"""What an operator runs and reads: commands, metrics, traces, records, upgrades."""
