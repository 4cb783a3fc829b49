"""Clients' keys: their form, where they are kept, and what each allows."""
