"""One provider call: its request is sent, its answer passed on, its silence bounded and reported. Which turn calls its
provider, and when, is not here.
"""
