"""The MLP of a block, fused, in Triton."""
