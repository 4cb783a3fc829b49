"""The tables of `tokenbus.toml`, a module for each."""
