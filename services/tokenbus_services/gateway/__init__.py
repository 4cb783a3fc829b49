"""The gateway: HTTP in the protocols that clients already speak, in front of the bus. It is stateless."""
