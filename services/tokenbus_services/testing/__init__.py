"""A whole bus inside a test's process: the implementation of `tokenbus.testing`.

The services and the server are real; only the model is scripted.
"""
