"""The first call compiles side by side what both of its passes launch.

By Triton's compiler itself, for a card that need not be there: only the launches are left out.
"""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is not installed")

SCRIPT = """
import torch, triton
from triton.backends.compiler import GPUTarget

class Card:
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)

triton.runtime.driver.set_active(Card())
from heedful.kernels import launching, parallel_compile
from heedful.kernels.{kernel} import {module} as kernel

compiled, launched = [], []

def count(*, fn, **rest):
    compiled.append(fn.name)

def first(pointers, program, grid, numbers, constants, options):
    before = len(compiled)
    program.warmup(*pointers, *numbers, grid=grid, **constants, **options)
    launched.append(len(compiled) - before)  # how many it had to compile by itself

triton.knobs.runtime.jit_post_compile_hook = count
launching.first = first
q, k, v = (torch.randn(1, 1, 256, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
o = {call}
print(len(compiled), *launched)
o.sum().backward()
print(len(compiled), *launched)
"""
CALLS = {
    "chunked_linear": ("triton", "kernel.chunked_linear(q, k, v, feature='elu1')[0]"),
    "softmax": ("fused", "kernel.attend(q, k, v, kernel.PLAIN, Causal(), None, 0.125)"),
}


@pytest.mark.parametrize("kernel", CALLS)
def test_both_passes_are_compiled_before_the_first_launch(kernel, tmp_path):
    module, call = CALLS[kernel]
    script = "from heedful.patterns import Causal\n" + SCRIPT.format(kernel=kernel, module=module, call=call)
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env)
    assert ran.returncode == 0, ran.stderr
    forward, both = (list(map(int, line.split())) for line in ran.stdout.splitlines())
    assert forward[0] == both[0] > len(forward[1:]) > 0, "programs of the backward pass were compiled too"
    assert not any(both[1:]) and len(both) > len(forward), "nothing was left to compile at a launch"
