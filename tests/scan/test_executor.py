"""Work spread over processes and over a real Ray cluster gives what it gives here."""

from __future__ import annotations

import os
import sys
from functools import partial

import mortal
import pytest
import tiny
import torch

from heedful import executor
from heedful.executor import EngineFailed, Executor, TaskFailed
from heedful.scan import Execution, scan
from heedful.store.scans import UNTIMED


def values(found) -> list:
    return [done.result() for done in found]


def test_items_come_back_in_order_and_no_more_are_begun_than_asked_for():
    begun = []
    results = Executor().run(lambda: lambda x: begun.append(x) or -x, range(5))
    assert [next(results).result(), next(results).result()] == [0, -1] and begun == [0, 1]


def test_an_error_here_costs_its_own_result():
    def work(x):
        return 1 // x

    one, two = Executor().run(lambda: work, [0, 1])
    assert isinstance(one.error, ZeroDivisionError) and two.result() == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"engine": "spark"}, "engine: 'spark', expected one of local, processes, ray"),
        ({"workers": 2}, "workers: the local engine has one. Ask for engine='processes'"),
        ({"engine": "processes", "workers": 0}, "workers: 0, expected 1 or more"),
        ({"engine": "processes", "address": "auto"}, "address: of a Ray cluster"),
        ({"limit": float}, "limit: engine 'local' can't stop a task"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        Executor(**options)


@pytest.fixture(scope="module")
def wild(tmp_path_factory):
    """Items that die, hang, raise, print or give what can't be sent, in two processes: (by item, in order, log)."""
    folder = tmp_path_factory.mktemp("wild")
    how = Executor(
        "processes", 2, threads=1, log=folder / "log", name=lambda item: f"item {item!r}",
        limit=lambda item: 0.5 if item == "hang" else 60.0,
    )  # fmt: skip
    items = ["hang", "plain", "die", "raise", "odd error", "unsendable", "print"]
    found = list(how.run(mortal.does_anything, items))
    return {done.item: done for done in found}, [done.item for done in found] == items, (folder / "log").read_text()


def test_what_happens_to_one_task_happens_to_no_other(wild):
    found, in_order, log = wild
    assert in_order and found["plain"].result() == ("plain", 1) and found["print"].result() == ("print", 1)
    assert str(found["hang"].error) == "item 'hang': it took longer than its limit of 0.5 s"
    assert str(found["die"].error).startswith("item 'die': its process died: SIGKILL")
    assert isinstance(found["raise"].error, ValueError) and str(found["raise"].error) == "this one raises"
    assert str(found["odd error"].error) == "Odd: a and b"
    assert "the result can't be sent to another process" in str(found["unsendable"].error)
    assert "said on the way" in log
    with pytest.raises(TaskFailed):
        found["die"].result()


def test_results_come_as_they_end_where_order_does_not_matter():
    how = Executor("processes", 2, threads=1)
    found = values(how.run(mortal.sleeps, [0.6, 0.0, 0.01], in_order=False))
    assert found == [0.0, 0.01, 0.6]


def test_whoever_stops_asking_ends_the_processes():
    results = Executor("processes", 2, threads=1).run(mortal.tells_its_process, range(100))
    process = next(results).result()
    results.close()
    assert not os.path.exists(f"/proc/{process}") or sys.platform != "linux"


def test_a_missing_cluster_is_told():
    pytest.importorskip("ray", reason="ray is not installed: pip install 'heedful[ray]'")
    with pytest.raises(EngineFailed, match="no Ray cluster could be reached there"):
        list(Executor("ray", address="127.0.0.1:1").run(lambda: abs, [1]))


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'heedful[ray]'")
    here = os.path.dirname(__file__)
    paths = [here, os.path.join(here, "..", "hf"), os.path.join(here, "..", "..", "src")]
    os.environ.setdefault(
        "RAY_worker_niceness", "0"
    )  # Ray starts workers with low priority: on a busy machine, for ever
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}},
    )
    yield ray
    ray.shutdown()


def test_a_worker_that_is_killed_is_retried(cluster, tmp_path):
    found = values(Executor("ray", 2).run(partial(mortal.dies_once, str(tmp_path)), range(6)))
    assert found == [0, 1, 4, 9, 16, 25] and (tmp_path / "2").exists()


def test_errors_come_back_as_they_are(cluster, tmp_path):
    with pytest.raises(ValueError, match=r"^nine will not do$"):
        values(Executor("ray", 1).run(partial(mortal.dies_once, str(tmp_path)), [0, 9]))


def test_a_worker_that_dies_of_its_item_is_given_up(cluster, monkeypatch):
    monkeypatch.setattr(executor, "RETRIES", 1)
    with pytest.raises(TaskFailed, match=r"^1: its worker died 2 times"):
        values(Executor("ray", 1).run(mortal.dies, [1]))


@pytest.mark.parametrize(("engine", "workers"), [("processes", 1), ("ray", 2)])
def test_a_scan_in_other_processes_gives_the_same_bits(request, model, tmp_path, engine, workers):
    if engine == "ray":
        request.getfixturevalue("cluster")
    texts = tiny.ids(3, 24)
    here = scan(model, None, texts, out=tmp_path / "here")
    run = Execution(engine=engine, workers=workers)
    there = scan(model, None, texts, out=tmp_path / "there", execution=run)
    assert torch.get_num_threads() == 1
    assert there.rows.select(UNTIMED).equals(here.rows.select(UNTIMED))
    assert there.thumbnails().equals(here.thumbnails())
