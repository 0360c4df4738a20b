"""Rows that are read where the model attends: its outputs, the same measures, and little memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tiny
import torch
import zoo

import heedful.hf as hf
from heedful.column_slabs import Trimmed
from heedful.executor import using
from heedful.hf import checks
from heedful.hf.calls import Call
from heedful.kernels.row_statistics.sums import Request
from heedful.measures.heads import Room
from heedful.patterns import Full
from heedful.scan import fused_capture, heads, scan, thread_pool, worker
from heedful.scan.baseline import Baselines
from heedful.scan.fused_capture import BufferPool, FusedCapture
from heedful.scan.heads import Kept, Measuring, measured, read, rows_of

# Grouped queries, softcap and window, sink, bias, full attention, window, cross-attention.
KINDS = ["llama", "gemma2", "gpt_oss", "t5", "bert", "mistral", "modernbert", "bart"]


def calls_of(name: str, n: int = 40, padding: str = "", dtype: torch.dtype = torch.float32) -> tuple[list[Call], dict]:
    species = tiny.species(name)
    inputs = zoo.texts(species, padding, batch=2 if padding else 1, n=n)
    calls: list[Call] = []
    hf.probe(zoo.grow(species, dtype), inputs, calls.append)
    return calls, inputs


def reader(inputs: dict, layers=None) -> FusedCapture:
    kept = Kept()
    return FusedCapture(layers, inputs.get("input_ids"), lambda: kept, BufferPool(), thread_pool.ThreadPool(threads=1))


@pytest.mark.parametrize("padding", ["", "left", "right"])
@pytest.mark.parametrize("name", KINDS)
def test_outputs_are_those_of_the_call(name, padding):
    calls, inputs = calls_of(name, padding=padding)
    read = reader(inputs)
    for call in calls:
        exact = call.to(torch.float64)
        out, beside = read.attend(exact)
        real = call.real[:, None, :, None]
        torch.testing.assert_close(out * real, exact.forward() * real, rtol=0, atol=1e-12)
        checks.check_call(exact, out, beside)


@pytest.mark.parametrize("name", ["llama", "gemma2", "t5"])
def test_outputs_have_the_precision_of_the_model(name):
    calls, inputs = calls_of(name, dtype=torch.bfloat16)
    read = reader(inputs)
    for call in calls:
        out, beside = read.attend(call)
        assert out.dtype == torch.bfloat16
        wanted = call.to(torch.float64).forward()
        assert float((out.double() - wanted).abs().max()) <= 2**-8 * float(call.v.abs().max())
        checks.check_call(call, out, beside)


@pytest.mark.parametrize("name", KINDS)
def test_measures_are_those_of_a_pass_by_itself(name):
    calls, inputs = calls_of(name)
    read, base = reader(inputs), Baselines()
    for call in calls:
        read.attend(call)
        passed = read.take()
        rows = measured(replace(call, v=call.v[..., :0]), passed, Measuring(), base)
        assert rows == rows_of(call, fused_capture.of_call(inputs.get("input_ids"), call), Measuring(), base)
        assert not passed.sums.product.numel(), "the outputs are the model's"


def test_only_calls_whose_heads_are_all_formed_together_and_measured_are_read(monkeypatch):
    calls, inputs = calls_of("llama")
    assert [call.at for call in calls] == [0, 1]
    read = reader(inputs, layers=(1,))
    assert read.attend(calls[0]) is None and read.take() is None
    assert read.attend(calls[1]) is not None and read.take() is not None
    monkeypatch.setattr(heads, "TOGETHER", 3 * 40 * 40)
    assert read.attend(calls[1]) is None
    monkeypatch.undo()
    monkeypatch.setattr(fused_capture, "FORMED", 40)
    assert read.attend(calls[1].part(0, 1)) is None


def test_a_pass_that_nobody_takes_gives_its_room_back():
    calls, inputs = calls_of("llama")
    read = reader(inputs)
    for call in [*calls, *calls]:
        read.attend(call)
    first = read.take()
    read.attend(calls[0])
    assert read.take().room is not first.room, "what was taken is not overwritten"
    assert not read.buffers._free


@pytest.mark.parametrize("fault", [lambda x: x * 1.01, lambda x: x.roll(1, -2), lambda x: x.flip(1)])
def test_outputs_that_are_not_the_models_are_caught_before_anything_is_measured(fault, model, tmp_path, monkeypatch):
    plain = fused_capture.read

    def wrong(*args):
        found = plain(*args)
        return replace(found, sums=replace(found.sums, product=fault(found.sums.product)))

    monkeypatch.setattr(fused_capture, "read", wrong)
    monkeypatch.setattr(worker, "measured", lambda *args: pytest.fail("was measured"))
    with pytest.raises(hf.CheckFailed, match=r"outputs in torch\.float32 differ from the model's own"):
        scan(model, None, tiny.ids(1, 40), out=tmp_path / "run")


def test_mass_that_is_lost_and_mass_ahead_are_caught():
    calls, inputs = calls_of("llama")
    read = reader(inputs)
    out, _ = read.attend(calls[0])
    passed = read.take()
    checks.check_call(calls[0], out, fused_capture._beside(passed))
    with pytest.raises(hf.CheckFailed, match=r"a row sums to 0\.99"):
        checks.check_call(calls[0], out, fused_capture._beside(replace(passed, columns=0.99 * passed.columns)))
    with pytest.raises(hf.CheckFailed, match=r"a row sums to 0\.0"):
        blind = replace(passed.sums, mass=0 * passed.sums.mass)
        checks.check_call(calls[0], out, fused_capture._beside(replace(passed, sums=blind)))
    leaking = replace(calls[0], pattern=Full())
    with pytest.raises(hf.CheckFailed, match="sees a later key"):
        checks.check_call(leaking, *read.attend(leaking))
    far = passed.sums.band_mass.clone()
    far[0, 1, 7, 1] = 1e-6
    with pytest.raises(hf.CheckFailed, match="sees a later key"):
        checks.check_call(
            calls[0], out, fused_capture._beside(replace(passed, sums=replace(passed.sums, band_mass=far)))
        )


def test_a_scan_records_the_same_numbers_either_way(model, tmp_path, monkeypatch):
    def rows(name):
        found = scan(model, None, tiny.ids(2, 40), out=tmp_path / name)
        return found.rows.drop("seconds", "sigma", "base_sigma").sort("text", "layer", "head")

    fused = rows("fused")
    monkeypatch.setattr(fused_capture, "_fits", lambda call: False)
    apart = rows("apart")
    for name in fused.columns:
        one, two = fused[name].to_list(), apart[name].to_list()
        if isinstance(one[0], float):
            assert one == pytest.approx(two, rel=1e-4, abs=1e-6), name
        else:
            assert one == two, name


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_few_rooms_are_lent_at_a_time(threads, model, tmp_path, monkeypatch):
    made = []

    class Counted(heads.Room):
        def __init__(self):
            super().__init__()
            made.append(self)

    monkeypatch.setattr(fused_capture, "Room", Counted)
    with using(threads):
        group = thread_pool.ThreadPool(threads)
        scan(model, None, tiny.ids(6, 40), out=tmp_path / "run")
    surveyed = 1
    others = group._others
    assert len(made) - surveyed <= (1 if not others else others + max(1, int(thread_pool.HOLDING * others)) + 1)


def test_a_pass_in_parts_is_the_pass_over_all_heads_bit_for_bit():
    calls, inputs = calls_of("llama", n=600)
    own = worker._Own()
    parted = FusedCapture(None, inputs["input_ids"], lambda: own.kept, BufferPool(), thread_pool.ThreadPool(threads=4))
    whole = reader(inputs)
    assert len(parted.threads.parts(calls[0].heads)) == 3
    for _ in range(2):  # the second time in rooms that are known
        for call in calls:
            one, two = whole.attend(call), parted.attend(call)
            assert all(map(torch.equal, one, two))
            first, second = whole.take(), parted.take()
            assert all(torch.equal(x, second.sums.tensors()[name]) for name, x in first.sums.tensors().items())
            for (*_, x), (*_, y) in zip(first.matrix.slabs, second.matrix.slabs, strict=True):
                assert torch.equal(x, y)
            assert torch.equal(first.columns, second.columns)
            assert torch.equal(first.energy, second.energy)
            for passed, of in ((first, whole), (second, parted)):
                of.buffers.give_back(passed.room)


def test_rows_from_slabs_are_those_of_the_whole_matrix_bit_for_bit():
    calls, inputs = calls_of("llama", n=600)
    for call in calls:
        passed = read(call, inputs["input_ids"], Kept(), Room())
        assert isinstance(passed.matrix, Trimmed)
        whole = torch.empty(1, call.heads, 600, 600)
        call.operator().row_sums(Request(into=whole))
        found, wanted = (
            measured(call, replace(passed, matrix=x), Measuring(), Baselines()) for x in (passed.matrix, whole)
        )
        assert found == wanted
        for one, two in zip(*map(heads.thumbnails, (passed.matrix, whole)), strict=True):
            assert one["scale"] == pytest.approx(two["scale"], rel=1e-6)
            assert max(abs(x - y) for x, y in zip(one["cells"], two["cells"], strict=True)) <= 1


def test_matrices_of_other_calls_in_the_same_room_are_whole():
    """A bias and few tokens: those are left as they are, beside slabs that stood there before."""
    call = calls_of("llama", n=600)[0][0]
    biased = replace(call, bias=torch.randn(1, 1, 600, 600, generator=torch.Generator().manual_seed(0)))
    room, kept = Room(), Kept()
    for one in (biased, call, biased, replace(call, pattern=Full()), call, biased):
        found = read(one, None, kept, room).matrix
        assert isinstance(found, Trimmed) == (one.bias is None)
        matrix = found @ torch.eye(600)
        torch.testing.assert_close(matrix.reshape(1, -1, 600, 600), one.operator().to_dense(), rtol=0, atol=1e-6)
