"""What keys may spend: prices, the count of what was spent, and the limits on admission."""
