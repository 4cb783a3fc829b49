"""Debug records: made of runs that were chosen, and read again. Intake chooses, and other runs cost nothing."""
