"""What a GEMM of the loss is, and what it is called."""
