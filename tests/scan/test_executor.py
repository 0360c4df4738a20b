"""Work spread over a real Ray cluster gives what it gives here."""

from __future__ import annotations

import os
from functools import partial

import mortal
import pytest
import tiny
import torch

from heedful import executor
from heedful.executor import EngineFailed
from heedful.scan import Execution, scan
from heedful.store import UNTIMED


def test_items_come_back_in_order_and_no_more_are_begun_than_asked_for():
    begun = []
    results = executor.run(lambda: lambda x: begun.append(x) or -x, range(5))
    assert [next(results), next(results)] == [0, -1] and begun == [0, 1]


def test_a_missing_cluster_is_told():
    pytest.importorskip("ray", reason="ray is not installed: pip install 'heedful[ray]'")
    with pytest.raises(EngineFailed, match="no Ray cluster could be reached there"):
        list(executor.run(lambda: abs, [1], engine="ray", address="127.0.0.1:1"))


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
    found = list(executor.run(partial(mortal.dies_once, str(tmp_path)), range(6), engine="ray", workers=2))
    assert found == [0, 1, 4, 9, 16, 25] and (tmp_path / "2").exists()


def test_errors_come_back_as_they_are(cluster, tmp_path):
    with pytest.raises(ValueError, match=r"^nine will not do$"):
        list(executor.run(partial(mortal.dies_once, str(tmp_path)), [0, 9], engine="ray", workers=1))


def test_a_worker_that_dies_of_its_item_is_given_up(cluster, monkeypatch):
    monkeypatch.setattr(executor, "RETRIES", 1)
    with pytest.raises(EngineFailed, match="a worker died 2 times over the same piece of work"):
        list(executor.run(mortal.dies, [1], engine="ray", workers=1))


def test_a_scan_over_two_processes_gives_the_same_bits(cluster, model, tmp_path):
    texts = tiny.ids(4, 24)
    here = scan(model, None, texts, out=tmp_path / "here")
    there = scan(model, None, texts, out=tmp_path / "there", execution=Execution(engine="ray", workers=2))
    assert torch.get_num_threads() == 1
    assert there.rows.select(UNTIMED).equals(here.rows.select(UNTIMED))
    assert there.thumbnails().equals(here.thumbnails())
