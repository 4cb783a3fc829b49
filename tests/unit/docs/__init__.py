"""Pages of docs/ that must say what the code says."""
