"""SEMANTICS 4: a take that has waited long says so in the log."""

import asyncio
import contextlib
import logging
import time

import pytest

import gradquorum as gq
from gradquorum.targets import local
from tests.support import TIMEOUT, accept, apply, wait_until


@pytest.fixture
def acc(make, caplog):
    caplog.set_level(logging.DEBUG, "gradquorum")
    return make.sparse("float32", (5, 1))


def waits(caplog):
    return [record for record in caplog.records if "waited" in record.getMessage()]


def test_log_is_after_60_s_and_then_every_10_minutes():
    assert local.FIRST_LOG_SECONDS == 60
    assert local.NEXT_LOG_SECONDS == 600


@pytest.mark.parametrize("form", ["take_grad", "submit_take"])
def test_take_waiting_long_logs_one_line_with_the_figures(acc, caplog, monkeypatch, run_thread, form):
    monkeypatch.setattr(local, "FIRST_LOG_SECONDS", 0.05)
    acc.set_global_step(7)
    apply(acc, [0], [1.0], local_step=6)
    accept(acc, [0], [1.0])
    take = run_thread(acc.take_grad, 2) if form == "take_grad" else acc.submit_take(2)
    wait_until(lambda: waits(caplog), "a line in the log")
    accept(acc, [0], [1.0])
    assert (take.result() if form == "take_grad" else take.result(TIMEOUT)).num_gradients == 2
    (record,) = waits(caplog)
    assert record.name.startswith("gradquorum")
    for words in ("have 1", "need 2", "step 7", "1 dropped as stale"):
        assert words in record.getMessage()


@pytest.mark.parametrize("form", ["take_grad", "submit_take"])
def test_take_waiting_on_logs_again_and_again(acc, caplog, monkeypatch, run_thread, form):
    monkeypatch.setattr(local, "FIRST_LOG_SECONDS", 0.02)
    monkeypatch.setattr(local, "NEXT_LOG_SECONDS", 0.03)
    take = run_thread(acc.take_grad, 1) if form == "take_grad" else acc.submit_take(1)
    wait_until(lambda: len(waits(caplog)) >= 3, "three lines in the log")
    accept(acc, [0], [1.0])
    assert (take.result() if form == "take_grad" else take.result(TIMEOUT)).num_gradients == 1


def test_take_ended_in_time_logs_nothing(acc, caplog):
    accept(acc, [0], [1.0])
    acc.take_grad(1)
    with pytest.raises(gq.DeadlineExceededError):
        acc.take_grad(1, timeout=0.05)
    assert not caplog.records


def test_take_that_logs_still_ends_at_its_deadline(acc, caplog, monkeypatch):
    monkeypatch.setattr(local, "FIRST_LOG_SECONDS", 0.0)
    with pytest.raises(gq.DeadlineExceededError):
        acc.take_grad(1, timeout=0.3)
    assert len(waits(caplog)) == 1


@pytest.mark.parametrize("form", ["submit_take", "take_grad_async"])
def test_take_cancelled_logs_nothing_and_is_forgotten(acc, caplog, monkeypatch, form):
    async def cancel():
        task = asyncio.ensure_future(acc.take_grad_async(1))
        await asyncio.sleep(0)
        assert task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    for seconds in (0.05, 0.5, 5.0):  # longer on a busy machine, where to cancel took longer than that
        monkeypatch.setattr(local, "FIRST_LOG_SECONDS", seconds)
        caplog.clear()
        began = time.monotonic()
        assert acc.submit_take(1).cancel() if form == "submit_take" else asyncio.run(cancel()) is None
        if time.monotonic() - began < seconds:
            break
    time.sleep(seconds + 0.1)
    assert not waits(caplog)
