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


@uncompiled
@torch.no_grad()
def decorated(x):
    return x.sin() + 1


@torch.no_grad()
def beside(x):
    return x.sin() + x.cos()


def around(x):
    return outer(x * 2) + 1


def test_neither_the_function_nor_what_it_calls_is_compiled():
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    x = torch.randn(5)
    assert torch.equal(torch.compile(around, backend=counter)(x), around(x))
    assert counter.frame_count == 2 and counter.op_count == 2  # x · 2, and + 1


def test_a_plain_function_is_not_wrapped_and_a_decorated_one_keeps_its_name():
    def plain(x):
        return x

    assert uncompiled(plain) is plain
    assert decorated.__name__ == "decorated" and not decorated(torch.ones(1, requires_grad=True)).requires_grad


def test_other_functions_with_the_same_decorator_are_compiled():
    """All functions under `torch.no_grad()` run the code of one wrapper."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    x = torch.randn(5)
    assert torch.equal(torch.compile(beside, backend=counter)(x), beside(x))
    assert counter.op_count >= 2  # sine and cosine


def test_importing_heedful_loads_no_compiler():
    code = "import sys, heedful; print([name for name in ('torch._dynamo', 'triton', 'sympy') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
