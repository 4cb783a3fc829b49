"""Blind faults: one fault, chosen at random and sealed, is diagnosed from the signals alone."""
