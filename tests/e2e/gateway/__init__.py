"""The gateway with the clients that its protocols have."""
