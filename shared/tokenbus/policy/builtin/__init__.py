"""Built-in policies: rewriting, tool rules, and a model as judge."""
