"""Media and images by reference."""
