"""Routes of the console: one module a subject. What they show is read and judged in the modules above."""
