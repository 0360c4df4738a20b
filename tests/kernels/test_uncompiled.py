"""Compilers leave kernels alone, and importing heedful does not load one."""

import subprocess
import sys

import torch

from heedful.kernels.dispatch import uncompiled


def inner(x):
    return x.sin() + x.cos()


@uncompiled
def outer(x):
    return inner(x).exp()


def around(x):
    return outer(x * 2) + 1


def test_neither_the_function_nor_what_it_calls_is_compiled():
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    x = torch.randn(5)
    assert torch.equal(torch.compile(around, backend=counter)(x), around(x))
    assert counter.frame_count == 2 and counter.op_count == 2  # x · 2, and + 1


def test_the_name_and_the_text_of_a_function_stay():
    assert outer.__name__ == "outer" and outer.__wrapped__(torch.zeros(1)) == torch.e


def test_importing_heedful_loads_no_compiler():
    code = "import sys, heedful; print([name for name in ('torch._dynamo', 'triton', 'sympy') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
