"""How products with an attention operator are computed: fused where possible, in tiles otherwise."""

from acutance.kernels.definitions import KERNELS, Kernel, get_kernel

__all__ = ["KERNELS", "Kernel", "get_kernel"]
