"""The GPU table: fixed workloads, times of heedful and its peers, a lower bound on the time, peak memory.

Times are medians of `triton.testing.do_bench`, which flushes the L2 cache before each call. The lower bound ("floor" in
the rows) is the larger of two times: the bytes that must be moved, at the copy bandwidth measured in the same run, and
the flops, at the rate below.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F

from heedful.bench import peers
from heedful.bench.peers import DENSE_CAUSAL, Contender, attend, favor
from heedful.bench.rows import Row, Rows, problem
from heedful.bench.setting import FORWARD, PASSES, Setting, Work
from heedful.core import Dims, Mechanism
from heedful.feature_maps import Elu1, Identity
from heedful.mechanisms.fixed_pattern import FixedPattern
from heedful.mechanisms.linear import Linear
from heedful.mechanisms.linformer import Linformer
from heedful.mechanisms.mixture import Mixture
from heedful.mechanisms.retention import Retention
from heedful.mechanisms.softmax import Softmax
from heedful.nn.attention import Attention
from heedful.patterns import Causal, Full, Strided, Window
from heedful.random_features import FavorPlus
from heedful.shapes import Tensor
from heedful.store import version

GPU_KEY = ("work", "size", "contender", "pass")
RATE = 700e12
"""Flops per second that large bfloat16 products reach on an H200."""
FIXED = ("current", "previous", "next", "left", "right", "start", "end")


@dataclass(frozen=True)
class GpuCase:
    """One workload.

    reach   target of heedful in milliseconds, forward and with backward
    cost    gives the lower bound: a mechanism with a `cost`, or a function that returns the minimal bytes and flops.
            None for the measures of a head, whose number of products depends on the data
    """

    name: str
    batch: int
    n: int
    ours: Contender
    rivals: tuple[Contender, ...] = ()
    reach: tuple[float, float | None] | None = None
    cost: Mechanism | Callable[[GpuCase], tuple[float, float]] | None = None
    passes: tuple[str, ...] = PASSES
    heads: int = 16
    d: int = 64

    @property
    def size(self) -> str:
        return f"B{self.batch} H{self.heads} N{self.n} d{self.d}"

    def setting(self, base: Setting) -> Setting:
        return replace(base, batch=self.batch, heads=self.heads, d=self.d)


# ── peers that need a GPU


def _flex(mask: Callable, setting: Setting, n: int) -> Work:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    blocks = create_block_mask(mask, None, None, n, n, device=setting.device)
    return Work(partial(torch.compile(flex_attention), block_mask=blocks), setting.draw(n))


def flex(mask: Callable) -> Contender:
    return Contender("FlexAttention", partial(_flex, mask))


def _fla(normalise: bool, setting: Setting, n: int) -> Work:
    from fla.ops.linear_attn import chunk_linear_attn

    def run(q, k, v):
        if normalise:
            q, k = F.elu(q) + 1, F.elu(k) + 1
        return chunk_linear_attn(q, k, v, scale=1.0, normalize=normalise)[0]

    return Work(run, _tokens_first(setting, n))


def _fla_retention(setting: Setting, n: int) -> Work:
    """fla chooses its own decays, one per head."""
    from fla.ops.retention import chunk_retention

    return Work(lambda q, k, v: chunk_retention(q, k, v, scale=1.0)[0], _tokens_first(setting, n))


def _fla_favor(setting: Setting, n: int) -> Work:
    """Features in torch, attention by fla."""
    from fla.ops.linear_attn import chunk_linear_attn

    features = FavorPlus(setting.d, 256, setting.seed).to(setting.device)

    def run(q, k, v):
        q, k = features.query(q).to(v.dtype), features.key(k).to(v.dtype)
        return chunk_linear_attn(q, k, v, scale=1.0)[0]

    return Work(run, _tokens_first(setting, n))


def _tokens_first(setting: Setting, n: int) -> list[Tensor]:
    return [x.transpose(1, 2).contiguous() for x in setting.draw(n)]


def fla(make: Callable[[Setting, int], Work], name: str = "fla") -> Contender:
    return Contender(name, make, package="flash-linear-attention", module="fla", same=False)


FLA_NORMALISED, FLA_RAW = fla(partial(_fla, True)), fla(partial(_fla, False))


def _window_mask(b, h, i, j):
    return (j <= i) & (i - j < 512)


def _strided_mask(stride: int, b, h, i, j):
    return (j <= i) & ((i - j) % stride == 0)


# ── workloads of more than one mechanism


def _fixed_heads(setting: Setting, n: int) -> Work:
    kinds = (FIXED * 3)[: setting.heads]
    return Work(Mixture([FixedPattern(kind) for kind in kinds]), setting.draw(n))


def _linformer_layer(setting: Setting, n: int) -> Work:
    """Linformer with projections of q, k, v and the output, as in the peer."""
    width = setting.heads * setting.d
    layer = Attention(width, setting.heads, Linformer(n, 256)).to(setting.device, getattr(torch, setting.dtype))
    return Work(layer, [setting.draw(n)[0].transpose(1, 2).flatten(2)], list(layer.parameters()))


def _linformer_peer(setting: Setting, n: int) -> Work:
    from linformer import LinformerSelfAttention

    width = setting.heads * setting.d
    layer = LinformerSelfAttention(width, n, k=256, heads=setting.heads, dim_head=setting.d, share_kv=True)
    layer = layer.to(setting.device, getattr(torch, setting.dtype))
    return Work(layer, [setting.draw(n)[0].transpose(1, 2).flatten(2)], list(layer.parameters()))


def _decode(setting: Setting, n: int) -> Work:
    """One token after n others; the cost does not depend on n."""
    attend_one = Linear(Elu1(), Causal())
    q, k, v = setting.draw(1)
    with torch.no_grad():
        _, state = attend_one.step(attend_one.init_state(q, k, v), q, k, v)
    return Work(lambda q, k, v: attend_one.step(state, q, k, v)[0], (q, k, v))


def _decode_cached(setting: Setting, n: int) -> Work:
    shape = setting.batch, setting.heads, n, setting.d
    kind = {"dtype": getattr(torch, setting.dtype), "device": setting.device}
    k, v = (torch.randn(shape, **kind) for _ in range(2))
    return Work(lambda q, *_: F.scaled_dot_product_attention(q, k, v), setting.draw(1))


def _measured_head(setting: Setting, n: int) -> Work:
    """Row statistics, the 64 largest singular values and the effective rank of one head."""
    from heedful.measures import effective_rank, head_measures

    def run(q, k, _):
        found = head_measures(Softmax(Causal()).operator(q, k), 64, tau=0.9)
        return effective_rank(found.spectrum, 0.9).estimate

    return Work(run, setting.draw(n))


def _dense_values(setting: Setting, n: int) -> Work:
    def run(q, k, _):
        scores = (q.float() @ k.float().mT * setting.d**-0.5).masked_fill(
            torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1), -torch.inf
        )
        return torch.linalg.svdvals(scores.softmax(-1))

    return Work(run, setting.draw(n))


CACHED = Contender("SDPA with a cache of n tokens", _decode_cached, same=False)


def _favor_least(case: GpuCase) -> tuple[float, float]:
    """Minimal bytes and flops: q, k, v and the output once; features of q and k; the state, m × (d + 1), updated and
    read for each token.
    """
    features, tokens = 256, case.batch * case.heads * case.n
    return 4 * 2 * tokens * case.d, 4 * tokens * features * (2 * case.d + 1)


def _linformer_least(case: GpuCase) -> tuple[float, float]:
    """Minimal bytes and flops: tokens in and out once; projections of q and of the output, r mixtures of the tokens,
    attention to them.
    """
    rank, width, tokens = 256, case.heads * case.d, case.batch * case.n
    return 2 * 2 * tokens * width, 2 * tokens * width * (2 * width + rank + 2 * rank)


def _decode_least(case: GpuCase) -> tuple[float, float]:
    """Minimal bytes and flops: the float32 state, d × (d + 1) per head, read and written."""
    numbers = case.batch * case.heads * case.d * (case.d + 1)
    return 2 * 4 * numbers, 4 * numbers


LINEAR, RAW, RETENTION = Linear(Elu1(), Causal()), Linear(Identity(), Causal(), normalise=False), Retention(0.97)
WINDOW = Softmax(Window(511))
STRIDED_128, STRIDED_256 = (Softmax(Strided(stride) & Causal()) for stride in (128, 256))
STRIDED_WINDOW = Softmax((Strided(256) | Window(255)) & Causal())

GPU_CASES = (
    GpuCase("causal linear, elu + 1, normalised", 1, 65536, Contender("heedful", attend(LINEAR)),
            (FLA_NORMALISED, DENSE_CAUSAL), (0.35, 1.3), LINEAR),
    GpuCase("the same", 4, 8192, Contender("heedful", attend(LINEAR)), (FLA_NORMALISED, DENSE_CAUSAL), (0.20, 0.80),
            LINEAR),
    GpuCase("the same", 8, 2048, Contender("heedful", attend(LINEAR)), (FLA_NORMALISED, DENSE_CAUSAL), (0.12, 0.50),
            LINEAR),
    GpuCase("unnormalised, features given", 1, 65536, Contender("heedful", attend(RAW)), (FLA_RAW,),
            (0.30, 1.2), RAW),
    GpuCase("retention", 1, 65536, Contender("heedful", attend(RETENTION)), (fla(_fla_retention),),
            (0.35, 1.3), RETENTION),
    GpuCase("FAVOR+ m = 256, causal", 1, 65536, Contender("heedful", favor(Causal())),
            (peers.PERFORMER_CAUSAL, fla(_fla_favor, "features in torch, fla")), (2.5, 8.0),
            _favor_least),
    GpuCase("FAVOR+ m = 256", 1, 65536, Contender("heedful", favor(Full())), (peers.PERFORMER,), (1.5, 5.0),
            _favor_least),
    GpuCase("strided l = 128", 4, 8192, Contender("heedful", attend(STRIDED_128)),
            (flex(partial(_strided_mask, 128)), DENSE_CAUSAL), (0.50, 2.2), STRIDED_128),
    GpuCase("strided l = 256", 1, 65536, Contender("heedful", attend(STRIDED_256)), (DENSE_CAUSAL,),
            (1.6, 6.0), STRIDED_256),
    GpuCase("strided l = 256 and its window", 1, 65536, Contender("heedful", attend(STRIDED_WINDOW)),
            (DENSE_CAUSAL,), None, STRIDED_WINDOW),
    GpuCase("window 512", 1, 65536, Contender("heedful", attend(WINDOW)),
            (flex(_window_mask), peers.LOCAL_ATTENTION), (0.80, 3.4), WINDOW),
    GpuCase("window 512", 4, 8192, Contender("heedful", attend(WINDOW)), (flex(_window_mask),), None, WINDOW),
    GpuCase("16 fixed heads of seven kinds", 1, 65536, Contender("heedful", _fixed_heads), (DENSE_CAUSAL,),
            (0.15, None), FixedPattern("current"), (FORWARD,)),
    GpuCase("Linformer r = 256 with projections", 1, 65536, Contender("heedful", _linformer_layer),
            (Contender("linformer", _linformer_peer, package="linformer", module="linformer", same=False),),
            (1.5, 4.5), _linformer_least),
    GpuCase("one head measured", 1, 8192, Contender("heedful", _measured_head),
            (Contender("dense svdvals", _dense_values, same=False),), (20.0, None), None, (FORWARD,), heads=1),
    GpuCase("one head measured", 1, 65536, Contender("heedful", _measured_head), (), (150.0, None), None, (FORWARD,),
            heads=1),
    GpuCase("one decoding step, batch 64", 64, 32768, Contender("heedful", _decode), (CACHED,), None, _decode_least,
            (FORWARD,), heads=32),
)  # fmt: skip


def machine() -> Row:
    """The GPU, its driver, and the bandwidth of a copy, measured now."""
    import triton
    from triton.testing import do_bench

    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    card = subprocess.run(query, capture_output=True, text=True).stdout.strip() or torch.cuda.get_device_name()
    x = torch.empty(2**29, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    seconds = do_bench(lambda: y.copy_(x), return_mode="median") / 1e3
    return {"card": card, "triton": triton.__version__, "bandwidth": 2 * x.numel() / seconds}


def measure_gpu(cases: Iterable[GpuCase], base: Setting, journal: Rows, say: Callable[[str], None]) -> None:
    """Time every workload with every contender; if a peer fails, its row has the reason instead of a time."""
    seen = machine()
    for case in cases:
        for contender in (case.ours, *case.rivals):
            rows = [_row(case, contender, base, which, seen) for which in case.passes]
            journal.add(rows)
            say(f"{case.name}, {case.size}, {contender.name}: " + ", ".join(_spoken(row) for row in rows))


def _row(case: GpuCase, contender: Contender, base: Setting, which: str, seen: Row) -> Row:
    setting = case.setting(base)
    found: dict[str, Any] = {"milliseconds": None, "device_milliseconds": None, "peak_bytes": None, "problem": None}
    if not contender.installed:
        found["problem"] = contender.missing
    else:
        try:
            found |= _time(contender.make(setting, case.n).call(which))
        except Exception as error:  # a peer may raise anything; go on with the others
            found["problem"] = problem(error)
    torch.cuda.empty_cache()
    ours = contender is case.ours
    return {
        "work": case.name,
        "contender": contender.name,
        "ours": ours,
        "size": case.size,
        "pass": which,
        **found,
        "reach": case.reach[case.passes.index(which)] if case.reach and ours else None,
        "floor": _floor(case, setting, which, seen["bandwidth"]) if ours else None,
        "version": version(contender.package),
        **seen,
    }


LONG = 1.0  # seconds; a call this long is measured once: a median would take a minute


def _time(call: Callable[[], object]) -> dict[str, Any]:
    from triton.testing import do_bench

    call()  # compiles
    torch.cuda.synchronize()
    before, start = torch.cuda.memory_allocated(), perf_counter()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    peak, seconds = torch.cuda.max_memory_allocated() - before, perf_counter() - start
    if seconds > LONG:
        return {"milliseconds": 1e3 * seconds, "device_milliseconds": 1e3 * seconds, "peak_bytes": peak}
    median = do_bench(call, warmup=20, rep=100, return_mode="median")
    return {"milliseconds": median, "device_milliseconds": _device_time(call), "peak_bytes": peak}


def _device_time(call: Callable[[], object], times: int = 5) -> float:
    """Milliseconds of GPU time for one call, without the time in which the GPU waits for the CPU."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as seen:
        for _ in range(times):
            call()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in seen.key_averages()) / times / 1e3


def _floor(case: GpuCase, setting: Setting, which: str, bandwidth: float) -> float | None:
    """A lower bound on the time in milliseconds. The backward pass reads q, k, v and the gradient and writes three
    gradients: 2.3 times the bytes of the forward pass, and 2.5 times its flops.
    """
    if case.cost is None:
        return None
    if isinstance(case.cost, Mechanism):
        cost = case.cost.cost(Dims(case.n, case.n, setting.d, setting.d, setting.batch * setting.heads, itemsize=2))
        moved, flops = float(cost.bytes), float(cost.flops)
    else:
        moved, flops = case.cost(case)
    more = (1.0, 1.0) if which == FORWARD else (3.3, 3.5)
    return 1e3 * max(more[0] * moved / bandwidth, more[1] * flops / RATE)


def _spoken(row: Row) -> str:
    if row["problem"]:
        return row["problem"]
    return f"{row['milliseconds']:.3f} ms" + (f" (reach {row['reach']:g})" if row["reach"] else "")


def gpu_table(rows: list[Row]) -> str:
    """The table as text: milliseconds forward and with backward, GPU time, target (✓ if reached), ratio to the lower
    bound, peak memory.
    """
    from heedful.bench.tables import columns, wrapped

    if not rows:
        return "gpu: nothing was measured."
    head = f"{rows[0]['card']}; torch {rows[0]['torch']}, triton {rows[0]['triton']}, commit {rows[0]['commit']}"
    body = [["", "forward", "both", "on the card", "reach", "× floor", "GiB"]]
    works = list(dict.fromkeys((row["work"], row["size"]) for row in rows))
    marks: list[tuple[int, str]] = []
    for work in works:
        marks.append((len(body), ", ".join(work)))
        own = [row for row in rows if (row["work"], row["size"]) == work]
        for name in dict.fromkeys(row["contender"] for row in own):
            body.append(_line(name, {row["pass"]: row for row in own if row["contender"] == name}))
    text = columns(body, "<>>>>>>", " ")
    for at, title in sorted(marks, reverse=True):
        text[at:at] = [title]
    problems = [f"{row['contender']}, {row['work']}: {row['problem']}" for row in rows if row["problem"]]
    return "\n".join(["Milliseconds, medians of do_bench", head, "", *text, *wrapped(dict.fromkeys(problems))])


def _line(name: str, by: dict[str, Row]) -> list[str]:
    def cell(which: str, field: str, form: str) -> str:
        value = by.get(which, {}).get(field)
        return "–" if value is None else format(value, form)

    times = [cell(which, "milliseconds", ".3f") for which in PASSES]
    reach = " / ".join(cell(which, "reach", "g") for which in PASSES if which in by)
    asked = [row for row in by.values() if row["reach"] and row["milliseconds"]]
    mark = "" if not asked else "✓ " if all(row["milliseconds"] <= row["reach"] for row in asked) else "✗ "
    floors = [
        f"{row['milliseconds'] / row['floor']:.1f}" for row in by.values() if row["floor"] and row["milliseconds"]
    ]
    peak = [row["peak_bytes"] for row in by.values() if row["peak_bytes"] is not None]
    card = [cell(which, "device_milliseconds", ".3f") for which in PASSES if which in by]
    return [
        f"  {name}",
        *times,
        " / ".join(card),
        f"{mark}{reach}" if asked else "",
        " / ".join(floors),
        f"{max(peak) / 2**30:.2f}" if peak else "–",
    ]
