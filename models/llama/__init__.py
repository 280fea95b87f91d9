"""Pretrains a Llama. The program is `train`; importing this package imports nothing."""
