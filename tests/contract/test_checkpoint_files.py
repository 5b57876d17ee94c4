"""Checkpoints in files: whole or refused; and what is no state, or a hostile one."""

import json
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradquorum as gq
from gradquorum import Defer, Weighted
from gradquorum.checkpoint import read_checkpoint, write_checkpoint
from tests.support import accept, available_engines, drain, unchanged

pytest.importorskip("safetensors")


def test_save_replaces_a_file_and_leaves_nothing_beside_it(make, tmp_path):
    acc = make.sparse()
    path = tmp_path / "round"
    acc.save(path)
    accept(acc, [0], [1.0])
    acc.save(str(path))
    assert os.listdir(tmp_path) == ["round"]
    restored = make.sparse()
    restored.load(path)
    assert restored.num_accumulated() == 1


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
