"""compose.yaml and the image at work on a real Docker engine, a mock provider in place of a model.

Run by `make test-docker`; skipped, with the reason, where no engine answers.
"""
