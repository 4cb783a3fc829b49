"""The runs that a page shows: what a gateway knows of each, which of them a page asked for, and their rows.
It does not send them; the sampler does.
"""
