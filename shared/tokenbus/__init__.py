"""tokenbus: a message bus for language-model output."""

__version__ = "0.1.0.dev0"
