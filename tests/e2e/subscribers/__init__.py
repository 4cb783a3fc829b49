"""Those who read what the services write."""
