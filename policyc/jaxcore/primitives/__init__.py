"""What the primitives of JAX do, and the definition of new ones."""
