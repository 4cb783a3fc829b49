"""How visible text is cut for those who show or speak it. Pure: no IO, no clock; what wires it to a bus is in
`client`."""

from tokenbus.shaping.coalesce import Coalescer
from tokenbus.shaping.sentences import SentenceRules, Sentences

__all__ = ["Coalescer", "SentenceRules", "Sentences"]
