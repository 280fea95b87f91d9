"""GPU kernels with the bits of the reference."""
