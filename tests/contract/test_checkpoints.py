"""Checkpoints: the same bits afterwards on either engine, files that are whole or refused, and nothing half done."""

import contextlib
import itertools
import json
import os
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradquorum as gq
from gradquorum import Defer, Weighted, Window
from gradquorum.checkpoint import read_checkpoint, write_checkpoint
from tests.support import (
    TIMEOUT,
    GatedMerges,
    accept,
    apply,
    assert_rows,
    assert_same_bits,
    available_engines,
    column,
    drain,
    failing_merges,
    only_local,
    unchanged,
    wait_until,
)

pytest.importorskip("safetensors")

DTYPES = ["float16", "bfloat16", "float32", "float64", "complex64", "complex128", "int32", "int64"]


@pytest.fixture(params=available_engines())
def other(request):
    """The engine on which a state is loaded."""
    return request.param


def same(restored, original):
    for name in ("global_step", "published_step", "num_undelivered", "num_deferred", "num_workers"):
        assert getattr(restored, name) == getattr(original, name), name
    assert restored.num_accumulated() == original.num_accumulated()


def assert_same_results(restored, original):
    results = [drain(acc) for acc in (restored, original)]
    assert len(results[0]) == len(results[1])
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a.indices, b.indices)
        assert_same_bits(a.values, b.values)
        np.testing.assert_array_equal(a.counts, b.counts)
        assert (a.num_gradients, a.step, a.workers) == (b.num_gradients, b.step, b.workers)


def fill(acc, rng, count, num_ids=300, rows=200, width=4):
    for i in range(count):
        values = rng.standard_normal((rows, width)) * 1000
        if acc.dtype.kind == "c":
            values = values + 1j * rng.standard_normal(values.shape)
        options = {"weight": float(rng.random() + 0.1)} if acc.reduction_type == "MEAN_BY_WEIGHT" else {}
        acc.apply_grad(
            rng.integers(0, num_ids, rows),
            values.astype(acc.dtype),
            local_step=None,
            worker=i % 3,
            sequence=i,
            **options,
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["MEAN", "SUM", "MEAN_BY_COUNT", "MEAN_BY_WEIGHT"])
def test_restored_round_gives_the_same_bits_on_either_engine(make, other, tmp_path, dtype, reduction):
    if dtype.startswith("int") and reduction != "SUM":
        return
    acc = make.sparse(dtype, (300, 4), reduction_type=reduction)
    fill(acc, np.random.default_rng(3), 5)
    acc.save(tmp_path / "round")
    restored = make.sparse(dtype, (300, 4), reduction_type=reduction, engine=other)
    restored.load(tmp_path / "round")
    same(restored, acc)
    for one in (acc, restored):
        fill(one, np.random.default_rng(4), 3)
    assert_same_results(restored, acc)


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16", "complex64"])
@pytest.mark.parametrize("reduction", ["MEAN", "MEAN_BY_WEIGHT"])
@pytest.mark.parametrize("staleness", ["strict", Weighted()], ids=repr)
def test_compacted_log_gives_the_same_bits_on_either_engine(make, other, dtype, reduction, staleness):
    options = {"reduction_type": reduction, "staleness": staleness}
    acc = make.sparse(dtype, **options)
    fill(acc, np.random.default_rng(3), 40, num_ids=600, rows=500, width=64)
    assert len(acc.state_dict()) < 100  # it has been compacted
    restored = make.sparse(dtype, engine=other, **options)
    restored.load_state_dict(acc.state_dict())
    for one in (acc, restored):
        fill(one, np.random.default_rng(4), 2, width=64)
    assert_same_results(restored, acc)


@pytest.mark.parametrize("reduction", ["MEAN", "SUM", "MEAN_BY_COUNT", "MEAN_BY_WEIGHT"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
@pytest.mark.parametrize("staleness", ["strict", Weighted()], ids=repr)
def test_group_with_dense_members_and_absent_ones_is_restored(make, other, dtype, reduction, staleness):
    members = {"a.b": gq.SparseSpec(dtype, (50, 2), reduction), "a": gq.DenseSpec(dtype, (3,), reduction)}
    group = make.group(members, staleness=staleness)
    group.set_global_step(2)
    rng = np.random.default_rng(0)
    for i in range(6):
        gradient = {"a.b": (rng.integers(0, 50, 7), rng.standard_normal((7, 2)).astype(group.members["a"].dtype))}
        if i % 2:
            gradient["a"] = rng.standard_normal(3).astype(group.members["a"].dtype)
        group.apply({} if i == 4 else gradient, 2 if staleness == "strict" else 2 - i % 3)
    restored = make.group(members, engine=other, staleness=staleness)
    restored.load_state_dict(group.state_dict())
    same(restored, group)
    a, b = group.take(6), restored.take(6)
    assert_same_bits(b["a.b"].values, a["a.b"].values)
    assert_same_bits(b["a"], a["a"])


def test_steps_marks_members_and_stale_ones_are_restored(make, other):
    acc = make.sparse()
    acc.set_global_step(4)
    acc.publish(3)
    accept(acc, [0], [1.0], worker="a", sequence=17)
    apply(acc, [0], [1.0], worker="a", sequence=16, local_step=1)
    acc.worker(7).leave()
    acc.worker("b")
    restored = make.sparse(engine=other)
    restored.load_state_dict(acc.state_dict())
    same(restored, acc)
    again = apply(restored, [0], [1.0], worker="a", sequence=16)
    assert (again.status, again.first_status) == (gq.ApplyStatus.DUPLICATE, gq.ApplyStatus.STALE)
    assert apply(restored, [0], [1.0], worker="a", sequence=17).status is gq.ApplyStatus.DUPLICATE
    assert restored.last_sequence("a") == 17
    with pytest.raises(gq.DeadlineExceededError, match="have 1, need 2 at step 4; 1 dropped as stale"):
        restored.take_grad(2, timeout=0)
    assert restored.take_grad(1).workers == ("a",)


def test_max_per_worker_is_kept_across_a_restart(make, other):
    options = {"max_per_worker": 1, "expected_workers": 2}
    acc = make.sparse(**options)
    accept(acc, [0], [1.0], worker=1)
    restored = make.sparse(engine=other, **options)
    restored.load_state_dict(acc.state_dict())
    assert apply(restored, [0], [1.0], worker=1).status is gq.ApplyStatus.REFUSED
    accept(restored, [0], [1.0], worker="1")


def test_deferred_gradients_are_restored(make, other):
    acc = make.sparse(staleness=Defer())
    acc.set_global_step(1)
    apply(acc, [0], [1.0], local_step=0, worker="a", sequence=0)
    accept(acc, [0], [5.0])
    restored = make.sparse(engine=other, staleness=Defer())
    restored.load_state_dict(acc.state_dict())
    same(restored, acc)
    assert_same_results(restored, acc)


def test_undelivered_rounds_are_restored_in_order(make, engine, other):
    acc = make.sparse()
    for value in (1.0, 2.0):
        accept(acc, [0], [value])
        future = acc.submit_take(1) if value == 2.0 else None
        if future is None:
            with failing_merges(engine), pytest.raises(MemoryError):
                acc.take_grad(1)
            assert acc.num_undelivered == 1
            state = acc.state_dict()
        else:
            assert_rows(future.result(TIMEOUT), [0], [1.0])
    restored = make.sparse(engine=other)
    restored.load_state_dict(state)
    assert (restored.num_undelivered, restored.global_step) == (1, 1)
    accept(restored, [0], [2.0])
    first, second = restored.take_grad(5), restored.take_grad(1)
    assert_rows(first, [0], [1.0])
    assert_rows(second, [0], [2.0])
    assert (first.step, second.step) == (0, 1)


def test_round_that_a_take_is_about_to_deliver_is_in_the_state(make, engine, run_thread):
    acc = make.sparse()
    accept(acc, [0], [1.0])
    with GatedMerges(engine) as merges:
        take = run_thread(acc.take_grad, 1)
        assert merges.begun.wait(TIMEOUT)
        state = acc.state_dict()
    assert_rows(take.result(), [0], [1.0])
    restored = make.sparse()
    restored.load_state_dict(state)
    assert restored.num_undelivered == 1
    assert_rows(restored.take_grad(1), [0], [1.0])
    after = make.sparse()
    after.load_state_dict(acc.state_dict())
    assert after.num_undelivered == 0  # by now it has been delivered


def test_takes_of_every_kind_leave_nothing_in_the_state_once_delivered(make):
    import asyncio

    acc = make.sparse()
    takes = [acc.take_grad, lambda n: acc.submit_take(n).result(TIMEOUT), lambda n: asyncio.run(acc.take_grad_async(n))]
    for take in takes:
        accept(acc, [0], [1.0])
        take(1)
    wait_until(lambda: len(acc.state_dict()) == 1, "the state of an empty round")


def test_state_shares_no_memory_with_the_round_or_with_the_callers_arrays(make):
    acc = make.sparse()
    values = column(1.0)
    apply(acc, [0], values)
    state = acc.state_dict()
    for array in state.values():
        assert not np.shares_memory(array, values)
        array[...] = 0
    values[...] = 5
    assert_rows(acc.take_grad(1), [0], [1.0])


@only_local("what goes to a server is copied")
def test_state_keeps_no_lent_array(make):
    acc = make.sparse()
    values = column(1.0)
    receipt = apply(acc, [0], values, copy=False)
    for array in acc.state_dict().values():
        assert not np.shares_memory(array, values)
    assert not receipt.released
    acc.take_grad(1)
    assert receipt.released


def test_state_is_plain_numpy(make):
    for dtype in DTYPES:
        acc = make.sparse(dtype, reduction_type="SUM")
        fill(acc, np.random.default_rng(0), 2)
        for array in acc.state_dict().values():
            assert type(array) is np.ndarray
            assert array.dtype.kind in "uif"
            assert array.dtype.isbuiltin == 1


def test_state_taken_while_others_apply_and_take_holds_whole_moments(make, run_thread, switch_often):
    """Each gradient has the same value in two rows; what was taken and what is in the state add up to a whole."""
    acc = make.sparse("float64", (4, 1), reduction_type="SUM")
    stop = threading.Event()

    def work(worker):
        for sequence in itertools.count():
            accept(acc, [0, 3], [1.0, 1.0], worker=worker, sequence=sequence)
            if stop.is_set():
                return

    def takes():
        while not stop.is_set():
            with contextlib.suppress(gq.DeadlineExceededError):
                acc.take_grad(3, timeout=0)

    others = [run_thread(work, 0), run_thread(work, 1), run_thread(takes)]
    wait_until(lambda: acc.global_step > 3, "the first rounds")
    states = {}

    def enough():
        state = acc.state_dict()
        states[state["header"].tobytes()] = state
        return len(states) == 20

    wait_until(enough, "20 different states")
    stop.set()
    for other in others:
        other.result()
    for state in states.values():
        restored = make.sparse("float64", (4, 1), reduction_type="SUM")
        restored.load_state_dict(state)
        for gradient in drain(restored):
            np.testing.assert_array_equal(gradient.values.ravel(), [gradient.num_gradients] * 2)
        restored.close()


# What it may be loaded into


def test_state_of_another_spec_is_refused_with_both_specs_printed(make):
    state = make.sparse("float32").state_dict()
    for other in (make.sparse("float64"), make.dense("float32"), make.sparse("float32", staleness=Window(1))):
        with unchanged(other), pytest.raises(gq.InvalidArgumentError, match=r"expected one of .* got one of .*float32"):
            other.load_state_dict(state)


def test_round_that_holds_gradients_is_not_overwritten(make, engine):
    state = make.sparse(staleness=Defer()).state_dict()
    accumulated, deferred, undelivered = (make.sparse(staleness=Defer()) for _ in range(3))
    accept(accumulated, [0], [1.0])
    deferred.set_global_step(1)
    apply(deferred, [0], [1.0], local_step=0)
    accept(undelivered, [0], [1.0])
    with failing_merges(engine), pytest.raises(MemoryError):
        undelivered.take_grad(1)
    for acc in (accumulated, deferred, undelivered):
        with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match="without gradients"):
            acc.load_state_dict(state)
    accumulated.discard()
    accumulated.load_state_dict(state)


def test_take_that_waits_is_served_from_the_restored_round(make):
    acc = make.sparse()
    accept(acc, [0], [1.0])
    accept(acc, [0], [3.0])
    restored = make.sparse()
    waiting = restored.submit_take(2)
    restored.load_state_dict(acc.state_dict())
    assert_rows(waiting.result(TIMEOUT), [0], [2.0])


def test_who_waits_for_a_published_step_looks_again_after_a_load(make, run_thread):
    acc = make.sparse()
    acc.publish(5)
    restored = make.sparse()
    waiting = run_thread(restored.wait_published, 5)
    restored.load_state_dict(acc.state_dict())
    assert waiting.result() == 5


def test_closed_handle_neither_saves_nor_loads(make, tmp_path):
    acc = make.sparse()
    state = acc.state_dict()
    acc.close()
    for call in (acc.state_dict, lambda: acc.load_state_dict(state), lambda: acc.save(tmp_path / "round")):
        with pytest.raises(gq.ClosedError):
            call()
    assert os.listdir(tmp_path) == []


def test_no_memory_for_a_loaded_state_leaves_the_round_as_it_was(make, engine):
    if engine != "native":
        return
    from gradquorum import _native

    acc = make.sparse("float64")
    fill(acc, np.random.default_rng(0), 3)
    state = acc.state_dict()
    restored = make.sparse("float64")
    _native._fail_allocation_after(2)
    try:
        with unchanged(restored), pytest.raises(gq.ResourceExhaustedError):
            restored.load_state_dict(state)
        _native._fail_allocation_after(2)
        with unchanged(acc), pytest.raises(gq.ResourceExhaustedError):
            acc.state_dict()
    finally:
        _native._fail_allocation_after(-1)
    restored.load_state_dict(state)
    assert_same_results(restored, acc)


# Files


def test_save_replaces_a_file_and_leaves_nothing_beside_it(make, tmp_path):
    acc = make.sparse()
    path = tmp_path / "round"
    acc.save(path)
    accept(acc, [0], [1.0])
    acc.save(str(path))
    assert os.listdir(tmp_path) == ["round"]
    restored = make.sparse()
    restored.load(path)
    same(restored, acc)


@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
def test_save_that_fails_leaves_the_old_file_whole_and_nothing_beside_it(make, tmp_path, monkeypatch, step):
    acc = make.sparse()
    path = tmp_path / "round"
    acc.save(path)
    before = path.read_bytes()
    accept(acc, [0], [1.0])

    def fail(*args, **kwargs):
        raise OSError("injected")

    if step == "write":
        import safetensors.numpy

        monkeypatch.setattr(safetensors.numpy, "save", fail)
    else:
        monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="injected"):
        acc.save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["round"]


def test_file_is_synced_before_it_is_renamed_and_the_folder_afterwards(make, tmp_path, monkeypatch):
    done = []
    fsync, replace = os.fsync, os.replace

    def sync(descriptor):
        done.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", lambda *names: (done.append("rename"), replace(*names)))
    make.sparse().save(tmp_path / "round")
    assert done == ["file", "rename", "folder"]


def test_missing_and_unreadable_files_are_os_errors(make, tmp_path):
    acc = make.sparse()
    with pytest.raises(FileNotFoundError):
        acc.load(tmp_path / "nothing")
    with pytest.raises(IsADirectoryError):
        acc.load(tmp_path)
    with pytest.raises(FileNotFoundError):
        acc.save(tmp_path / "no" / "folder")


def test_what_is_no_regular_file_is_refused_without_waiting_for_it(make, tmp_path):
    acc = make.sparse()
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match=r"expected a regular file, got [pc]rw"):
            acc.load(path)
    for call in (acc.save, acc.load):
        for path in ("", "a\0b", b"\0"):
            with pytest.raises(gq.InvalidArgumentError, match="path: expected that of a file"):
                call(path)


def test_any_name_that_the_file_system_takes_can_be_saved_to(make, tmp_path):
    acc = make.sparse()
    accept(acc, [0], [1.0])
    for path in (tmp_path / ("x" * 255), os.fsencode(tmp_path / "bytes")):
        acc.save(path)
        restored = make.sparse()
        restored.load(path)
        assert restored.num_accumulated() == 1
    assert sorted(os.listdir(tmp_path)) == ["bytes", "x" * 255]


def test_save_replaces_a_symbolic_link_and_leaves_what_it_points_to(make, tmp_path):
    (tmp_path / "target").write_text("mine")
    (tmp_path / "link").symlink_to("target")
    make.sparse().save(tmp_path / "link")
    assert not (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "mine"
    make.sparse().load(tmp_path / "link")


@pytest.fixture
def saved(tmp_path):
    """Return a file of a round with one of everything, and how to make an accumulator for it."""
    options = {"dtype": "float32", "shape": (50, 2), "staleness": Defer(), "engine": available_engines()[-1]}
    acc = gq.SparseConditionalAccumulator(**options)
    acc.set_global_step(1)
    for worker in range(3):
        acc.apply_grad([worker, 3], np.ones((2, 2), np.float32), local_step=worker % 2, worker=worker, sequence=0)
    path = tmp_path / "round"
    acc.save(path)
    acc.close()
    return path, lambda: gq.SparseConditionalAccumulator(**options)


def test_truncated_file_is_refused_wherever_it_ends(saved):
    path, build = saved
    whole = path.read_bytes()
    acc = build()
    for length in [*range(0, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match="expected a checkpoint"):
            acc.load(path)
    path.write_bytes(whole)
    acc.load(path)


def test_foreign_file_is_refused(saved):
    from safetensors.numpy import save_file

    path, build = saved
    acc = build()
    save_file({"weight": np.zeros(3)}, path)
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match="expected a checkpoint of gradquorum"):
        acc.load(path)
    path.write_bytes(b"\x80\x04\x95 this is no checkpoint but might be a pickle")
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match="expected a checkpoint of gradquorum"):
        acc.load(path)


def test_file_of_a_later_version_is_refused_by_its_version(saved):
    path, build = saved
    state = read_checkpoint(path)
    with_header(state, lambda header: header.update(version=2, news=1))
    write_checkpoint(path, state)
    with pytest.raises(gq.InvalidArgumentError, match="expected version 1, got 2"):
        build().load(path)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "BF16", "BOOL", "none"])
def test_file_of_another_dtype_or_one_that_numpy_lacks_is_refused(saved, dtype):
    path, build = saved
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    rows = header["log.0.0.rows"]
    num_bytes = rows["data_offsets"][1] - rows["data_offsets"][0]
    rows.update(dtype=dtype, shape=[num_bytes // 2 if dtype == "BF16" else num_bytes])
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    acc = build()
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError):
        acc.load(path)


def test_file_claiming_huge_sizes_is_refused_without_allocating(saved):
    path, build = saved
    header = json.dumps({"header": {"dtype": "U8", "shape": [2**60], "data_offsets": [0, 2**60]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(gq.InvalidArgumentError):
        build().load(path)
    path.write_bytes((2**62).to_bytes(8, "little") + b"{}")
    with pytest.raises(gq.InvalidArgumentError):
        build().load(path)


def with_header(state, change):
    header = json.loads(state["header"].tobytes())
    change(header)
    state["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)


def _first(header):
    return header["log"][0]


HOSTILE_HEADERS = {
    "no JSON": lambda h: h.clear(),
    "negative sequence": lambda h: _first(h).update(sequence=-1),
    "step beyond int64": lambda h: h.update(step=2**63),
    "fraction": lambda h: h.update(step=1.5),
    "no gradients in a contribution": lambda h: _first(h).update(num_gradients=0),
    "many gradients without counts": lambda h: _first(h).update(num_gradients=7),
    "more gradients than int64": lambda h: [one.update(num_gradients=2**63 - 1) for one in h["log"]],
    "huge rows": lambda h: _first(h).update(forms=[[2**62]]),
    "another row shape": lambda h: _first(h).update(forms=[[1]]),
    "no row shape": lambda h: _first(h).update(forms=[None]),
    "two members": lambda h: _first(h).update(forms=[[2], [2]]),
    "a contribution too many": lambda h: h["log"].append(_first(h)),
    "a contribution too few": lambda h: h["log"].pop(),
    "accepted too many": lambda h: h.update(accepted=[[1, 100]]),
    "short window": lambda h: h["marks"][0].update(window="AAAA"),
    "window of no judgement": lambda h: h["marks"][0].update(window="/" * 86 + "8="),
    "worker that is a list": lambda h: _first(h).update(worker=[1]),
    "empty undelivered round": lambda h: h["undelivered"].append({"step": 0, "workers": [], "log": []}),
    "unknown field": lambda h: h.update(extra=1),
    "deep nesting": lambda h: h.update(step=json.loads("[" * 500 + "]" * 500)),
}


@pytest.mark.parametrize("name", HOSTILE_HEADERS)
def test_hostile_header_is_refused_and_the_state_untouched(saved, name):
    path, build = saved
    state = read_checkpoint(path)
    with_header(state, HOSTILE_HEADERS[name])
    acc = build()
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match="state"):
        acc.load_state_dict(state)


HOSTILE_ARRAYS = {
    "descending ids": ("indices", lambda a: a[::-1]),
    "negative ids": ("indices", lambda a: a - 100),
    "repeated ids": ("indices", lambda a: a * 0),
    "ids beyond the table": ("indices", lambda a: a + 100),
    "too many ids": ("indices", lambda a: np.arange(5)),
    "ids as a matrix": ("indices", lambda a: a.reshape(1, -1)),
    "ids as floats": ("indices", lambda a: a.astype(float)),
    "big-endian negative": ("indices", lambda a: (a - 100).astype(">i8")),
    "rows of another width": ("rows", lambda a: a[:, :1]),
    "rows as a vector": ("rows", lambda a: a.ravel()),
    "rows of another dtype": ("rows", lambda a: a.astype(np.float16)),
    "rows that are no array": ("rows", lambda a: a.tolist()),
    "no weight": ("weight", lambda a: a[:0]),
    "weight that is not a number": ("weight", lambda a: a * np.nan),
    "negative weight": ("weight", lambda a: -a),
    "counts that do not fit": ("counts", lambda a: np.ones(9, np.int64)),
    "counts above the gradients": ("counts", lambda a: np.full(2, 2**40)),
    "an unknown part": ("more", lambda a: np.ones(2)),
}


@pytest.mark.parametrize("name", HOSTILE_ARRAYS)
def test_hostile_array_is_refused_and_the_state_untouched(saved, name):
    path, build = saved
    state = read_checkpoint(path)
    part, change = HOSTILE_ARRAYS[name]
    state[f"log.0.0.{part}"] = change(state.get(f"log.0.0.{part}"))
    acc = build()
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match="state"):
        acc.load_state_dict(state)


@pytest.mark.parametrize("state", [None, [], {}, {"header": 1}, {"header": np.zeros(3)}, {1: 2}], ids=repr)
def test_what_is_no_state_is_refused(make, state):
    acc = make.sparse()
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match="state: expected"):
        acc.load_state_dict(state)


def test_array_of_no_gradient_is_refused(make):
    state = make.sparse().state_dict()
    with pytest.raises(gq.InvalidArgumentError, match="expected no arrays beside"):
        make.sparse().load_state_dict({**state, "log.0.0.rows": np.ones((1, 1))})


@given(data=st.data())
def test_file_with_changed_bytes_is_refused_or_loads_a_round_that_can_be_taken(data):
    import tempfile

    options = {"dtype": "float32", "shape": (50, 2), "reduction_type": "MEAN", "staleness": Weighted()}
    with tempfile.TemporaryDirectory() as folder, gq.SparseConditionalAccumulator(**options) as acc:
        path = os.path.join(folder, "round")
        acc.set_global_step(1)
        for step in (0, 1):
            acc.apply_grad([1, 3], np.ones((2, 2), np.float32), local_step=step, worker=step, sequence=0)
        acc.save(path)
        with open(path, "rb") as file:
            content = bytearray(file.read())
        for at in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
            content[at] = data.draw(st.integers(0, 255))
        with open(path, "wb") as file:
            file.write(content)
        with gq.SparseConditionalAccumulator(**options) as restored:
            try:
                restored.load(path)
            except gq.InvalidArgumentError:
                assert restored.num_accumulated() == 0
            else:
                with np.errstate(all="ignore"):
                    drain(restored)


def test_missing_safetensors_says_what_to_install(make, tmp_path, monkeypatch):
    import sys

    acc = make.sparse()
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(gq.GradQuorumError, match="pip install safetensors"):
        acc.save(tmp_path / "round")
    assert acc.state_dict()


@pytest.mark.parametrize("worker", ["\ud800", 10**5000], ids=["surrogate", "5001 digits"])
def test_worker_that_cannot_be_written_is_an_error_and_nothing_has_changed(make, worker):
    acc = make.sparse()
    accept(acc, [0], [1.0], worker=worker)
    with unchanged(acc), pytest.raises(gq.InvalidArgumentError, match="state: expected workers"):
        acc.state_dict()
