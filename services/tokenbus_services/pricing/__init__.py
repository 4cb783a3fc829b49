"""What tokens cost, and how each provider API counts them. Pure."""
