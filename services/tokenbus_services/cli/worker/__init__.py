"""`tokenbus worker`: runs one service in this process."""
