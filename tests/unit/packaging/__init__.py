"""What the distribution declares, and what it says where only a part of it is installed."""
