"""Estimates what a training step costs on a GPU, and compiles it for a GPU that is not present."""

__all__ = ["compile_report", "deviceless", "gemm_cost", "gpus", "hlo", "llama_step", "step_cost"]
