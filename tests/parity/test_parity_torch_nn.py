from inspect import signature

import pytest
from parity_matrix import MatrixChecks
from torch import nn


class TestTorchNN(MatrixChecks):
    library = "torch.nn"

    @pytest.mark.parametrize("kind", [nn.MultiheadAttention, nn.TransformerEncoderLayer])
    def test_there_are_no_grouped_queries_to_test(self, kind):
        assert not [name for name in signature(kind).parameters if "kv_heads" in name or "group" in name]
