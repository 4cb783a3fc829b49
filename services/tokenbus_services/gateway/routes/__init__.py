"""Routes of the gateway: one module a client protocol, and what they share. Answers are in `answers`."""
