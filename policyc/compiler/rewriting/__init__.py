"""A plan to a quantized loss."""
