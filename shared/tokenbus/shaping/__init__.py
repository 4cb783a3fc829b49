"""Splits visible text for display or speech. Pure: no IO, no clock. `client` connects it to the bus."""

from tokenbus.shaping.display_coalescer import Coalescer
from tokenbus.shaping.sentences import SentenceRules, Sentences

__all__ = ["Coalescer", "SentenceRules", "Sentences"]
