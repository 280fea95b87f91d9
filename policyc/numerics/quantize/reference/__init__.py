"""The quantizers of every format in plain jnp: the specification, bit by bit."""
