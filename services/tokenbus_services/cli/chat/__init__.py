"""`tokenbus chat`: a session in the terminal, or with lines from a pipe."""
