"""How visible text is cut for those who show or speak it. Pure: no IO, no clock; what wires it to a bus is in
`client`."""
