"""What compiled code is told about functions of ours."""

import subprocess
import sys

import torch

from acutance.kernels import packed, packed_operation
from acutance.kernels.tracing import constant_in_traces


def test_the_mark_is_that_of_torch():
    def ours():
        return 1

    def theirs():
        return 1

    torch.compiler.assume_constant_result(theirs)
    constant_in_traces(ours)
    assert vars(ours) == vars(theirs) != {}
    for function in (packed._is_known, packed_operation._is_exporting):
        assert vars(function) == vars(theirs)


def test_a_compiled_function_does_not_look_inside():
    calls = []

    @constant_in_traces
    def answer():
        calls.append(3)
        return 3

    run = torch.compile(lambda x: x * answer(), backend="eager", fullgraph=True)
    assert run(torch.ones(2)).tolist() == run(torch.ones(2)).tolist() == [3, 3]
    assert calls == [3], "once, when it was traced"


def test_the_package_starts_without_the_compiler():
    program = "import sys, acutance.cli; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
