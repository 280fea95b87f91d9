"""How a quantized GEMM runs: one module a backend."""
