"""Which parameter, and which layer of it, an operand comes from."""
