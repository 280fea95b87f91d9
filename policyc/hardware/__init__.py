"""Estimates what a training step costs on a GPU, and compiles it for a GPU that is not present."""

__all__ = [
    "collectives",
    "communication",
    "compile_report",
    "deviceless",
    "gemm_cost",
    "gpus",
    "hlo",
    "llama_step",
    "mesh",
    "saved_activations",
    "selftest",
    "step_cost",
    "training_step",
]
