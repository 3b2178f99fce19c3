"""Fused attention for CUDA, in Triton. Nothing outside `attend` and the operator calls it."""
