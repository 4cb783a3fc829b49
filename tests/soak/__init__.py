"""`make soak`: a deployment under an even, mixed load, and whether anything in it grows."""
