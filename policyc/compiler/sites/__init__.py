"""What a GEMM of the loss is, what it is called, and which layers a rule matches."""
