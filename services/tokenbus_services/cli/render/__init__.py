"""The output of commands: tables, plain text, live views of runs. Escapes terminal control sequences from models."""
