"""Validation and size limits of JSON Schemas provided by users. Shared by intake and the tool executor."""
