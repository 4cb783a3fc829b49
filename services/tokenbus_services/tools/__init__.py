"""The tool executor: tools that settings declare, checked and run; each call gives a result, whatever happens in it.

What a model asked for and where its result goes is the parser's; how calls travel is the bus's.
"""
