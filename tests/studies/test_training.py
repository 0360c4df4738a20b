"""Training, translation and the runner on the 200 pairs that come with the package."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from itertools import islice

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("tokenizers")

from heedful.feature_maps import Elu1
from heedful.nn import MaskedSoftmax, MaterialisedLinear
from heedful.patterns import Causal, Full, Window
from heedful.random_features import FavorPlus
from heedful.store import Damaged
from heedful.studies import fixed_heads, frozen_projections
from heedful.studies.config import Group, Model, Run, Training, build
from heedful.studies.corpora import tasks
from heedful.studies.corpora.__main__ import main as build_corpora
from heedful.studies.data import BEGIN, END, PAD, WIDTHS, Pairs, Side, batches, gather, load, shuffle_targets
from heedful.studies.heads import describe_heads
from heedful.studies.loss import token_loss
from heedful.studies.records import append, finished, read
from heedful.studies.run import main, work
from heedful.studies.step import Steps, batch_loss, make_optimiser, rate, round_to
from heedful.studies.train import evaluate, start, train, unigram_loss
from heedful.studies.translate import search, translate

CPU = torch.device("cpu")
TINY = {"width": 32, "head_dim": 4, "hidden": 64, "layers": 1, "dropout": 0.1}
SEVEN = fixed_heads.CELLS["7Ftoken+1L"].encoder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpora")
    build_corpora(["--language", "small", "--sizes", "160", "--out", str(folder)])
    return folder


@pytest.fixture(scope="module")
def corpus(data):
    return load(data / "small-160", "de-en")


def tiny(steps: int = 12, **options) -> Run:
    training = Training(steps, tokens=512, evaluations=3)
    return Run("smoke", "tiny", "small-160", training, Model(**{**TINY, "encoder": SEVEN}), **options)


def test_the_hash_of_a_config_is_stable_and_tells_configs_apart():
    run = Run("fixed-heads", "8L", "de-5000", Training(1500))
    assert run.key == "3b7ead5c2b750e71"
    others = [replace(run, seed=1), replace(run, shuffled=True), replace(run, model=replace(run.model, dropout=0.1))]
    assert len({run.key, *(other.key for other in others)}) == 4
    studies = [*fixed_heads.runs(range(3)), *frozen_projections.runs(range(3))]
    assert len({run.key for run in studies}) == len(studies)


@pytest.mark.parametrize(
    "model",
    [*fixed_heads.CELLS.values(), *frozen_projections.CELLS.values(), *frozen_projections.COMBINED.values()],
    ids=[*fixed_heads.CELLS, *frozen_projections.CELLS, *frozen_projections.COMBINED],
)
def test_every_cell_of_the_studies_takes_a_step(model, corpus):
    run = Run("smoke", "cell", "small-160", Training(2), replace(model, width=64, head_dim=8, hidden=32, layers=2))
    net = start(run, corpus, CPU)
    pairs = corpus.splits["train"]
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    loss, norm = Steps(net, run.training)(gather(pairs, torch.arange(6)), 1)
    assert loss.isfinite() and norm > 0
    stuck = [name for name, p in net.named_parameters() if torch.equal(p, before[name]) and not name.endswith("A")]
    assert not stuck  # the first step of a LoRA moves B alone


def test_the_model_of_the_studies_has_about_ten_million_weights():
    count = sum(p.numel() for p in build(Model(), 8000).parameters())
    assert 9e6 < count < 11e6


def test_a_batch_holds_the_sentences_and_their_words(corpus):
    pairs = corpus.splits["train"]
    batch = gather(pairs, torch.tensor([3, 8, 1]))
    assert all(x.shape[1] % 8 == 0 for x in batch)
    for row, number in enumerate((3, 8, 1)):
        source, target = (side.tokens[side.starts[number] : side.starts[number + 1]].tolist() for side in pairs)
        begins = pairs.source.begins[pairs.source.starts[number] : pairs.source.starts[number + 1]]
        n, m = len(source), len(target)
        assert batch.source[row].tolist() == [*source, END] + [PAD] * (batch.source.shape[1] - n - 1)
        assert batch.segments[row].tolist() == [0] * (n + 1) + [-1] * (batch.source.shape[1] - n - 1)
        assert batch.words[row, :n].tolist() == begins.cumsum(0).tolist()
        assert batch.given[row, : m + 1].tolist() == [BEGIN, *target]
        assert batch.wanted[row, : m + 1].tolist() == [*target, END]
        assert (batch.wanted[row, m + 1 :] == PAD).all()


def test_an_epoch_sees_every_pair_once_in_batches_of_few_shapes(corpus):
    pairs = corpus.splits["train"]
    seen, shapes, rows = [], [], batches(pairs, 400, seed=5)
    while len(seen) < len(pairs):
        chunk = next(rows)
        count, width = gather(pairs, chunk).source.shape
        assert width in WIDTHS and count == 400 // width
        shapes.append((count, width))
        seen += [row for row in chunk.tolist() if row >= 0]
    assert sorted(seen) == list(range(len(pairs)))
    again = [tuple(gather(pairs, chunk).source.shape) for chunk in islice(rows, len(shapes))]
    assert sorted(shapes) == sorted(again)
    first, second, other = ([x.tolist() for x in islice(batches(pairs, 400, seed), 5)] for seed in (5, 5, 6))
    assert first == second != other


def test_words_begin_at_spaces_and_punctuation(data, corpus):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(data / "small-160" / "tokenizer.json"))
    source = corpus.splits["test"].source
    text = (data / "small-160" / "test.de.txt").read_text().splitlines()[0]
    end = int(source.starts[1])
    words, tokens, begins = [], source.tokens[:end].tolist(), source.begins[:end].tolist()
    for token, begin in zip(tokens, begins, strict=True):
        piece = tokenizer.id_to_token(token)
        words = [*words, piece] if begin else [*words[:-1], words[-1] + piece]
    assert tokenizer.decode(tokens) == text
    assert [word.strip("▁") for word in words] == text.replace(".", " .").replace("?", " ?").split()


def test_eight_pairs_are_learned_by_heart_and_translated_back(corpus, data):
    whole = corpus.splits["train"]
    pairs = Pairs(*(Side(side.tokens, side.begins, side.starts[:9]) for side in whole))
    model = Model(encoder=SEVEN, width=64, head_dim=8, hidden=128, layers=1, dropout=0.0)
    run = Run("smoke", "overfit", "small-160", Training(60, rate=5e-3, smoothing=0.0), model)
    net = start(run, corpus, CPU)
    steps, batch = Steps(net, run.training), gather(pairs, torch.arange(8))
    for step in range(1, 61):
        loss, _ = steps(batch, step)
    assert loss < 0.05
    wanted = [pairs.target.tokens[pairs.target.starts[i] : pairs.target.starts[i + 1]].tolist() for i in range(8)]
    assert translate(net, pairs, CPU, beam=3) == wanted
    assert translate(net, pairs, CPU, beam=1) == wanted


def test_beam_search_finds_the_best_sentence_where_all_can_be_tried():
    """A beam as wide as the tree of all short sentences is an exhaustive search, whatever the preference for length."""
    vocabulary, longest, alphas = 7, 3, (0.0, 1.0, 4.0)
    allowed = [token for token in range(vocabulary) if token not in (PAD, BEGIN, END)]
    sentences = [[], *([a] for a in allowed), *([a, b] for a in allowed for b in allowed)]
    pairs = Pairs(*(Side(torch.tensor([4, 5, 6]), torch.ones(3).long(), torch.tensor([0, 3])),) * 2)
    batch = gather(pairs, torch.arange(1))
    depends = False
    for seed in range(4):
        torch.manual_seed(seed)
        positions = "rope" if seed % 2 else "sinusoidal"
        shape = Model(encoder=SEVEN, width=32, head_dim=4, hidden=32, layers=1, dropout=0.0, positions=positions)
        net = build(shape, vocabulary).eval()
        with torch.no_grad():
            memory = net.encode(batch.source, segments=batch.segments, words=batch.words)
            likely = []
            for sentence in sentences:
                given = torch.tensor([[BEGIN, *sentence]])
                log_p = net.logits(net.decode(given, memory, memory_segments=batch.segments)).log_softmax(-1)[0]
                likely.append(float(sum(log_p[at, token] for at, token in enumerate([*sentence, END]))))
            found = [search(net, memory, batch.segments, longest, 100, alpha)[0] for alpha in alphas]
        for alpha, answer in zip(alphas, found, strict=True):
            ranked = [x / ((5 + len(s) + 1) / 6) ** alpha for x, s in zip(likely, sentences, strict=True)]
            assert answer == sentences[ranked.index(max(ranked))]
        depends |= found[0] != found[-1]
    assert depends


def test_resuming_gives_the_same_bits(corpus, tmp_path):
    run, kept = tiny(), []
    whole = train(run, corpus, CPU, kept.append)
    path = tmp_path / "checkpoint.pt"
    train(run, corpus, CPU, lambda line: None, checkpoint=path, checkpoint_every=5, stop_after=7)
    again = train(run, corpus, CPU, lambda line: None, checkpoint=path)
    for (name, one), other in zip(whole.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    assert [line["step"] for line in kept] == [4, 8, 12]
    with pytest.raises(ValueError, match="checkpoint of run"):
        train(replace(run, seed=3), corpus, CPU, kept.append, checkpoint=path)


def test_the_rate_rises_and_falls():
    settings = Training(100, rate=2.0, warmup=0.1)
    assert rate(settings, 5) == pytest.approx(1.0)
    assert rate(settings, 10) == pytest.approx(2.0)
    assert rate(settings, 100) == pytest.approx(0.2)


def test_shuffled_targets_are_the_same_sentences_elsewhere(corpus):
    pairs = corpus.splits["train"]
    shuffled = shuffle_targets(pairs, 0)

    def sentences(side):
        return [tuple(side.tokens[a:b].tolist()) for a, b in zip(side.starts, side.starts[1:], strict=False)]

    assert sorted(sentences(shuffled.target)) == sorted(sentences(pairs.target))
    moved = sum(a != b for a, b in zip(sentences(shuffled.target), sentences(pairs.target), strict=True))
    assert moved > 0.9 * len(pairs)


def test_padding_costs_nothing_of_the_loss(corpus):
    net = build(Model(encoder=SEVEN, **TINY), corpus.vocabulary).eval()
    pairs = corpus.splits["train"]
    rows = torch.tensor([0, 20, 5])
    together = batch_loss(net, gather(pairs, rows))
    torch.testing.assert_close(together, batch_loss(net, gather(pairs, torch.tensor([0, 20, 5, -1, -1]))))
    batches_of_one = [gather(pairs, rows[i : i + 1]) for i in range(3)]
    counts = [(batch.wanted != PAD).sum() for batch in batches_of_one]
    apart = sum(count * batch_loss(net, batch) for count, batch in zip(counts, batches_of_one, strict=True))
    torch.testing.assert_close(together, apart / sum(counts), rtol=1e-5, atol=1e-5)


def test_the_loss_and_its_gradients_are_those_of_torch(corpus):
    """In float64, with smoothed labels and with padding."""
    torch.manual_seed(0)
    x, E = torch.randn(9, 6).double().requires_grad_(), torch.randn(11, 6).double().requires_grad_()
    wanted = torch.tensor([3, PAD, 10, 4, 4, 1, PAD, 7, 2])
    for smoothing in (0.0, 0.1):
        known = torch.nn.functional.cross_entropy(x @ E.mT, wanted, ignore_index=PAD, label_smoothing=smoothing)
        found = token_loss(x, E, wanted, smoothing, PAD)
        torch.testing.assert_close(found, known)
        grads = [torch.autograd.grad(3 * loss, (x, E)) for loss in (found, known)]
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    "cell", [*fixed_heads.CELLS, "hadamard", "linear, learned", "favor+, learned", "window, learned"]
)
def test_a_step_never_waits_for_the_device(cell, corpus):
    """What a CUDA graph can't capture: reading a number back, and tensors made from the host's."""

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert func.name() not in ("aten::_local_scalar_dense", "aten::nonzero", "aten::lift_fresh"), func
            return func(*args, **(kwargs or {}))

    model = replace(
        (fixed_heads.CELLS | frozen_projections.CELLS | frozen_projections.COMBINED)[cell],
        width=64,
        head_dim=8,
        hidden=32,
        layers=2,
    )
    net = start(Run("smoke", cell, "small-160", Training(2), model), corpus, CPU)
    batch = gather(corpus.splits["train"], torch.arange(6))
    with Watch():
        batch_loss(net, batch, 0.1).backward()


def test_a_run_is_recorded_once_and_whole(data, tmp_path):
    run = tiny(4)
    lines = work(run, data, CPU)
    assert [line["kind"] for line in lines] == ["config", "steps", "steps", "steps", "steps", "result"]
    assert {line["run"] for line in lines} == {run.key}
    result = lines[-1]
    assert len(result["outputs"]["test"]) == 20 and set(result["losses"]) >= {"train", "dev", "test", "test_unseen"}
    assert sum(len(line["norm"]) for line in lines if line["kind"] == "steps") == 4
    append(tmp_path, lines)
    append(tmp_path, [{**line, "run": "other"} for line in lines[:-1]])
    assert finished(tmp_path) == {run.key}
    assert json.dumps(list(read(tmp_path))[: len(lines)]) == json.dumps(lines)
    file = tmp_path / "records-00.jsonl.gz"
    file.write_bytes(file.read_bytes() + b"\x1f\x8b cut off")
    with pytest.warns(Damaged):
        assert finished(tmp_path) == {run.key}
    with pytest.warns(Damaged, match="set aside"):
        append(tmp_path, [{**lines[-1], "run": "later"}])
    assert finished(tmp_path) == {run.key, "later"}


def test_the_runner_works_through_a_queue_and_skips_what_is_done(data, tmp_path, capsys):
    command = ["--corpora", "small-160", "--data", str(data), "--out", str(tmp_path), "--steps", "2", "--tiny"]
    command += ["--cells", "7Ftoken+1L", "--seeds", "0-1", "--parallel", "1", "--seconds", "240"]
    assert main(command) == 0
    assert len(finished(tmp_path)) == 2
    assert main(command) == 0
    assert "0 runs to do, 2 recorded already" in capsys.readouterr().out


@pytest.mark.parametrize("task", ["recall", "manuals", "prose"])
def test_other_tasks_count_their_tokens_and_take_a_step(task, tmp_path, monkeypatch):
    texts = [
        f"The {word} of package {at} is described here, in the words of its authors."
        for at in range(40)
        for word in ("use", "aim", "age")
    ]
    names = list(tasks.MANUALS)
    found = [
        tasks.Paragraph(names[at % 5], f"page {at % 30}", f"{names[at % 5]} {text}") for at, text in enumerate(texts)
    ]
    monkeypatch.setattr(tasks, "download", lambda names, folder: [])
    monkeypatch.setattr(tasks, "paragraphs", lambda packages, wanted: (found * (9 if task == "prose" else 1), {}))
    card = tasks.build(task, tmp_path, tmp_path, 50)
    small = load(tmp_path / task, "de-en")
    assert small.task == task and small.has_source == (task == "manuals")
    run = next(run for run in frozen_projections.runs([0], [task]) if run.cell == "orthogonal")
    run = replace(run, model=replace(run.model, width=32, head_dim=4, hidden=32, layers=1))
    pairs = small.splits["train"]
    batch = gather(pairs, torch.arange(3))
    counted = {"recall": 3 * 15, "manuals": 3, "prose": 3 * tasks.BLOCK}[task]
    assert (batch.wanted != PAD).sum() == counted
    net = start(run, small, CPU)
    loss, _ = Steps(net, run.training)(batch, 1)
    assert loss.isfinite()
    assert 0 <= evaluate(net, small.splits["test"], CPU, 8)["accuracy"] < 1
    if task == "recall":
        assert unigram_loss(small, "test") == pytest.approx(4.16, abs=0.2)  # log 64
        answers, given = batch.wanted[0], batch.given[0]
        at = (answers != PAD).nonzero().flatten()
        shown = dict(given[1:31].reshape(15, 2).tolist())
        assert [shown[int(given[i])] for i in at] == answers[at].tolist()
    elif task == "manuals":
        assert card["baselines"]["bag_of_words_accuracy"]["test"] == 1  # each text names its manual
    else:
        assert card["baselines"]["pairs_of_tokens_loss"]["test"] < unigram_loss(small, "test")


def test_numbers_of_a_config_can_be_set(capsys):
    command = ["--list", "--cells", "8L", "--corpora", "de-5000", "--seeds", "0"]
    keys = []
    for change in ("training.rate=1e-3", "training.rate=5e-4", "model.dropout=0.1"):
        assert main([*command, "--set", change]) == 0
        keys.append(json.loads(capsys.readouterr().out)["run"])
    assert keys[0] == Run("fixed-heads", "8L", "de-5000", Training(1500)).key
    assert len(set(keys)) == 3
    with pytest.raises(SystemExit, match="expected a number"):
        main([*command, "--set", "model.depth=3"])


def test_heads_are_described_by_where_they_look_and_by_their_twins(corpus):
    kinds = ("current", "previous", "next", "left", "last")
    model = Model(encoder=(fixed_heads.fixed("token", (*kinds, "current")), Group(2)), **TINY)
    torch.manual_seed(0)
    rows = describe_heads(build(replace(model, layers=2), corpus.vocabulary), corpus.splits["dev"], CPU, 7)
    assert [(row["layer"], row["head"]) for row in rows] == [(layer, head) for layer in (0, 1) for head in range(8)]
    for at, kind in enumerate(kinds):
        assert rows[at][kind] == rows[8 + at][kind] == pytest.approx(1, abs=1e-3), kind
    assert rows[0]["twin_cosine"] == pytest.approx(1, abs=1e-3) and rows[0]["twin"] in ([0, 5], [1, 0], [1, 5])
    assert rows[1]["twin"] == [1, 1]  # the same fixed pattern in the other layer
    assert rows[0]["entropy"] == 0 < rows[6]["entropy"] <= 1
    lengths = (corpus.splits["dev"].source.lengths[:7] + 1).float()
    assert rows[0]["first"] == pytest.approx(float(7 / lengths.sum()), abs=1e-3)  # row 0 alone looks at itself there


def test_an_unknown_group_is_named():
    with pytest.raises(ValueError, match="expected one of softmax"):
        build(Model(encoder=(Group(8, "sofmax"),)), 10)


def test_rounded_weights_follow_their_float32_masters(corpus):
    """What a GPU does, on the CPU: bfloat16 computes, float32 is updated, and both descend alike."""
    run = replace(tiny(20), model=replace(tiny().model, dropout=0.0), training=Training(20, rate=3e-3, warmup=0.5))
    batch = gather(corpus.splits["train"], torch.arange(12))
    exact, rounded = (Steps(start(run, corpus, CPU), run.training) for _ in range(2))
    rounded.masters = [torch.nn.Parameter(p.detach().clone()) for p in rounded.weights]
    round_to(rounded.model, torch.bfloat16)
    rounded.optimiser = make_optimiser(rounded.masters, run.training)
    losses = torch.stack([torch.stack([steps(batch, at)[0] for steps in (exact, rounded)]) for at in range(1, 21)])
    torch.testing.assert_close(losses[:, 1], losses[:, 0], rtol=0.01, atol=0)
    assert losses[-1, 1] < losses[0, 1] - 0.3
    for master, weight in zip(rounded.masters, rounded.weights, strict=True):
        assert weight.dtype == torch.bfloat16 and torch.equal(weight, master.to(torch.bfloat16))


@pytest.mark.parametrize("pattern", [Full(), Causal(), Window(3)])
@pytest.mark.parametrize(
    "make",
    [MaskedSoftmax, partial(MaterialisedLinear, Elu1()), partial(MaterialisedLinear, FavorPlus(8, 16))],
    ids=["softmax", "linear", "favor+"],
)
def test_mechanisms_for_short_sequences_are_their_matrix(make, pattern):
    if make is not MaskedSoftmax and isinstance(pattern, Window):
        return
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 9, 8, dtype=torch.float64).unbind()
    attend = make(pattern).double()
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1, -1, -1], [0] * 9])[:, None]
    keys = torch.tensor([[0] * 5 + [-1] * 4, [-1] * 9])[:, None]  # the second sees nothing
    for segments in (None, ids, *([(torch.zeros_like(ids), keys)] if isinstance(pattern, Full) else [])):
        known = attend.matrix(q, k, segments=segments) @ v
        torch.testing.assert_close(attend(q, k, v, segments=segments), known)
    torch.testing.assert_close(attend(q[..., -1:, :], k, v), attend.matrix(q, k)[..., -1:, :] @ v)
