"""Faults planted blind: one of five, chosen at random and sealed, to be diagnosed from the signals alone."""
