"""`tokenbus doctor`: checks of a deployment, each with the way to mend what it finds."""
