"""`tokenbus doctor`: checks a deployment and says how to fix each problem."""
