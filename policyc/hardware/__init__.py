"""What a training step costs on a GPU, and how XLA compiles it for a GPU that is not here."""

__all__ = ["deviceless", "gemm_cost", "hlo", "llama_step", "step_cost"]
