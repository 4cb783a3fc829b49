"""Shapes streamed output: text for display or speech, JSON as its elements. Pure: no IO, no clock. `client` connects it
to the bus.
"""

from tokenbus.shaping.json_elements import JsonElement, JsonElements, RunElement, RunElements
from tokenbus.shaping.sentences import Coalescer, SentenceRules, Sentences

__all__ = ["Coalescer", "JsonElement", "JsonElements", "RunElement", "RunElements", "SentenceRules", "Sentences"]
