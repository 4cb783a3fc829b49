"""The normalizer: turns raw provider bytes from `raw` into normalized events on `events`, with the library's
decoders.
"""
