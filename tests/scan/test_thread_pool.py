"""Threads that measure beside the forward pass: the same numbers whoever does it, and nothing lost when one breaks."""

import threading
import time

import pytest
import tiny
import torch

from heedful.executor import using
from heedful.hf import Refused
from heedful.scan import scan, thread_pool, worker
from heedful.scan.thread_pool import ThreadPool


@pytest.fixture(autouse=True)
def two_threads():
    with using(2):
        yield


def rows_of(model, folder):
    found = scan(model, None, tiny.ids(2, 40), out=folder)
    return found.rows.drop("seconds").sort("text", "layer", "head")


def test_results_come_in_the_order_of_the_jobs_and_others_do_some_of_them():
    seen, begun = set(), threading.Event()

    def work(x):
        seen.add(threading.current_thread().name)
        begun.set()
        return x

    pair = ThreadPool(2)
    with pair.running():
        first = pair.submit(lambda: work(0))
        assert begun.wait(10)
        jobs = [pair.submit(lambda x=x: work(x)) for x in range(1, 20)]
        assert [job.result() for job in [first, *jobs]] == list(range(20))
    assert any(name.startswith("heedful") for name in seen)


def test_whoever_hands_jobs_in_does_them_where_the_others_are_behind():
    gate, pair = threading.Event(), ThreadPool(2)
    with pair.running():
        slow = pair.submit(gate.wait)
        jobs = [pair.submit(threading.current_thread) for _ in range(thread_pool.BEHIND + 3)]
        done = [job for job in jobs if not job.is_waiting]
        assert len(done) >= 2 and {job.result() for job in done} == {threading.current_thread()}
        gate.set()
        assert slow.result() and len([job.result() for job in jobs]) == len(jobs)


@pytest.mark.parametrize("threads", [1, 2, 5, 40])
def test_every_job_has_the_same_threads_and_no_gradients_and_the_rest_is_as_before(threads):
    with using(threads):
        group = ThreadPool(threads)
        with group.running():
            assert torch.get_num_threads() == group.leading
            jobs = [group.submit(lambda: (torch.get_num_threads(), torch.is_grad_enabled())) for _ in range(40)]
            assert len({job.result() for job in jobs}) == 1 and jobs[0].result()[1] is False
            each = jobs[0].result()[0]
        assert torch.get_num_threads() == threads
    assert each * min(threads // 2, thread_pool.MOST) + group.leading <= max(threads, 2)


def test_the_numbers_of_a_scan_do_not_depend_on_who_measured(model, tmp_path, monkeypatch):
    usual = rows_of(model, tmp_path / "usual")
    for name in ("BEHIND", "HOLDING"):
        monkeypatch.setattr(thread_pool, name, 0)  # nearly all by the thread of the forward pass
    here = rows_of(model, tmp_path / "here")
    for name in ("BEHIND", "HOLDING"):
        monkeypatch.setattr(thread_pool, name, 100)  # nearly all by the other one
    there = rows_of(model, tmp_path / "there")
    assert usual.equals(here) and usual.equals(there)


def test_what_breaks_in_another_thread_is_told_and_the_rest_is_not_done():
    gate, done, pair = threading.Event(), [], ThreadPool(2)

    def broken():
        gate.wait()
        raise ValueError("this one")

    with pytest.raises(ValueError, match="this one"), pair.running():
        bad = pair.submit(broken)
        waiting = [pair.submit(lambda: done.append(1)) for _ in range(thread_pool.BEHIND)]
        gate.set()
        bad.result()
    counted = len(done)  # of those that were begun before the error was seen
    assert all(not job.is_waiting for job in waiting) and counted <= len(waiting)
    with pair.running():
        assert pair.submit(lambda: 7).result() == 7


def test_a_model_that_writes_over_what_is_being_measured_is_refused(model, tmp_path, monkeypatch):
    measured = worker.measured

    def meanwhile(call, *rest, **more):
        found = measured(call, *rest, **more)
        call.k.add_(0)
        return found

    monkeypatch.setattr(worker, "measured", meanwhile)
    with pytest.raises(Refused, match="writes over queries or keys"):
        rows_of(model, tmp_path / "run")


def test_shared_work_that_fails_leaves_nothing_to_be_done_later():
    crew, begun, done = ThreadPool(threads=2), threading.Event(), []

    def busy():
        begun.set()
        time.sleep(0.2)

    def fail():
        raise ValueError("no")

    with crew.running():
        waiting = crew.submit(busy)
        begun.wait()
        with pytest.raises(ValueError, match="no"):
            crew.run_all([fail, lambda: done.append(1)])
        waiting.result()
        crew.submit(lambda: None).result()
    assert not done
