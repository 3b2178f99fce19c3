"""The one idea: attention is a linear operator A on values. One layer's attention in one forward pass is one call."""

from acutance.attention.affine import Program
from acutance.attention.attend import attend, finish
from acutance.attention.call import AttentionCall

__all__ = ["AttentionCall", "Program", "attend", "finish"]
