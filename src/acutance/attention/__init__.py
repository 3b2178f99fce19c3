"""The one idea: attention is a linear operator A on values.

`AttentionCall` is one layer's attention in one forward pass, `attend` computes it, `AttentionOperator` is A without the
N×N matrix, and `kernels` holds what is fused on CUDA. No model, metric or mitigation is known here.
"""

from acutance.attention.affine import Program
from acutance.attention.attend import attend, finish
from acutance.attention.call import AttentionCall

__all__ = ["AttentionCall", "Program", "attend", "finish"]
