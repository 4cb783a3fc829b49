"""What providers do, right and wrong, and what is made of it."""
