"""Faults that are planted blind: one of five, chosen at random and sealed, to be told from the signals alone."""
