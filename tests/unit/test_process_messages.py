"""What travels between client and server: everything arrives as it was, and nothing else is let in."""

import os
import sys

import msgspec
import numpy as np
import pytest

import gradquorum as gq
from gradquorum.specs import Options, RoundSpec

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="several processes need Linux")
if sys.platform == "linux":
    from gradquorum.targets.process import messages as m
    from gradquorum.targets.process.failures import to_error, to_failure
    from gradquorum.targets.process.memory import SharedMemory
    from gradquorum.targets.process.parts import arrays_of, gradient_parts, write
    from gradquorum.targets.process.specs import from_spec, to_spec
    from gradquorum.targets.process.states import pack, unpack
    from gradquorum.validation import check_dense, check_sparse


def travelled(message, decoder):
    return decoder.decode(m.encode(message))


@pytest.mark.parametrize("worker", [0, -1, 2**63, -(10**30), "", "7", "name", "\ud800", "ж"])
def test_worker_arrives_as_it_was(worker):
    found = m.from_worker(m.to_worker(worker))
    assert found == worker
    assert type(found) is type(worker)


@pytest.mark.parametrize("worker", [b"", b"x1", b"i", b"izz", b"s\xff"])
def test_what_is_no_worker_is_refused(worker):
    with pytest.raises(ValueError):
        m.from_worker(worker)


ERRORS = [
    gq.InvalidArgumentError("Shape mismatch: \ud800"),
    gq.InvalidDTypeError("dtype"),
    gq.DeadlineExceededError("late", have=1, need=2, step=3, num_stale=4),
    gq.CancelledError("TakeGrad operation was cancelled"),
    gq.ClosedError("closed"),
    gq.ResourceExhaustedError("full", needed_bytes=1, held_bytes=2, max_bytes=3),
    gq.UnavailableError("gone", live=1, needed=2, left=(3, "3")),
    gq.UnavailableError("broken", outcome_known=False),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_error_arrives_as_it_was(error):
    found = to_error(travelled(to_failure(error), m.FROM_SERVER))
    assert type(found) is type(error)
    assert (str(found), found.__dict__) == (str(error), error.__dict__)


def test_foreign_errors_arrive_as_one_of_ours():
    assert type(to_error(to_failure(MemoryError("x")))) is gq.ResourceExhaustedError
    found = to_error(to_failure(KeyError("x")))
    assert type(found) is gq.GradQuorumError
    assert "KeyError" in str(found)


POLICIES = ["strict", gq.Window(3), gq.Weighted("exponential", decay=0.1, max_lag=2), gq.Weighted(), gq.Defer()]


@pytest.mark.parametrize("staleness", POLICIES, ids=repr)
def test_spec_arrives_as_it_was(staleness):
    members = {"a": gq.SparseSpec("bfloat16", (None, 3), "SUM"), "b": gq.DenseSpec("float16", (2,), "MEAN_BY_WEIGHT")}
    options = Options(
        accumulate_dtype="float32", expected_workers=2, max_per_worker=3, on_nonfinite="skip", staleness=staleness
    )
    spec = RoundSpec("AccumulatorGroup", members, options)
    found = from_spec(msgspec.msgpack.decode(m.encode(to_spec(spec)), type=m.Spec))
    assert (found.kind, found.members, found.options) == (spec.kind, spec.members, spec.options)
    assert found.describe() == spec.describe()


@pytest.mark.parametrize(
    "spec",
    [
        lambda: m.Spec(b"x", (), {}),
        lambda: m.Spec(b"x", (m.MemberSpec(b"", True, b"object", (), b"MEAN"),), {}),
        lambda: m.Spec(b"x", (m.MemberSpec(b"", True, b"float32", (), b"MEDIAN"),), {}),
        lambda: m.Spec(b"x", (m.MemberSpec(b"", True, b"float32", (2**40, 2**62), b"MEAN"),), {}),
        lambda: m.Spec(b"x", (m.MemberSpec(b"", True, b"float32", (), b"MEAN"),), {"order": "random"}),
        lambda: m.Spec(b"x", (m.MemberSpec(b"", True, b"float32", (), b"MEAN"),), {"surprise": 1}),
        lambda: m.Spec(b"x", (m.MemberSpec(b"", True, b"float32", (), b"MEAN"),), {"staleness": "strict"}),
        lambda: m.Spec(b"x", (m.MemberSpec(b"", True, b"float32", (), b"MEAN"),), {}, ("Window", -1)),
        lambda: m.Spec(b"x", (m.MemberSpec(b"", True, b"float32", (), b"MEAN"),), {}, ("Weighted", "math.exp", 0.5)),
        lambda: m.Spec(b"x", (m.MemberSpec(b"", True, b"float32", (), b"MEAN"),), {}, ("Loose",)),
        lambda: m.Spec(b"x", (m.MemberSpec(b"", True, b"float32", (), b"MEAN"),), {}, ()),
    ],
)
def test_spec_that_cannot_be_is_refused(spec):
    with pytest.raises(gq.InvalidArgumentError):
        from_spec(spec())


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x90",
        msgspec.msgpack.encode([99]),
        msgspec.msgpack.encode([3, -1, True]),
        msgspec.msgpack.encode([3, 2**64 - 1, True]),
        msgspec.msgpack.encode([2, b"x" * (1 << 19), None]),
        msgspec.msgpack.encode([7, 0, 1, 1, -1.0, False, False]),
        msgspec.msgpack.encode({"type": 8}),
        msgspec.msgpack.encode([38, 1]),
    ],
)
def test_what_is_no_request_is_refused(raw):
    with pytest.raises(msgspec.MsgspecError):
        m.FROM_CLIENT.decode(raw)


def gradient():
    sparse, dense = gq.SparseSpec("float32", (9, 3)), gq.DenseSpec("complex64")
    ids, values = np.array([5, 1], np.int64), np.arange(6, dtype=np.float32).reshape(2, 3)[:, ::-1]
    whole = np.array([[1j, 2]], np.complex64)
    checked = (check_sparse(sparse, "", ids, values)[0], check_dense(dense, "", whole))
    return (sparse, dense), checked, [ids, values, whole]


def test_arrays_of_a_gradient_lie_where_the_other_side_looks():
    specs, checked, expected = gradient()
    parts, arrays, num_bytes = gradient_parts(checked)
    memory = np.zeros(num_bytes, np.uint8)
    write(memory, arrays)
    there = arrays_of(memory, specs, parts)
    for found, array in zip(there, expected, strict=True):
        np.testing.assert_array_equal(found, array)
        assert found.flags.aligned
    assert there[-1].ctypes.data + there[-1].nbytes == memory.ctypes.data + num_bytes


@pytest.mark.parametrize("change", ["short", "rows", "row", "huge", "kind", "missing"])
def test_parts_that_do_not_fit_their_memory_are_refused(change):
    specs, checked, _ = gradient()
    parts, _, num_bytes = gradient_parts(checked)
    sparse, dense = parts
    parts = {
        "rows": (m.Part(2000, (3,)), dense),
        "row": (m.Part(2, (2**40, 2**40)), dense),
        "huge": (m.Part(2**63 - 1, (2**63 - 1,)), dense),
        "kind": (dense, sparse),
        "missing": (sparse,),
    }.get(change, parts)
    memory = np.zeros(num_bytes - (change == "short"), np.uint8)
    with pytest.raises(ValueError):
        arrays_of(memory, specs, parts)


def packed(state):
    """Return the memory in which a state travels, and the bytes of its table."""
    reply, descriptor = pack(state, SharedMemory())
    with os.fdopen(descriptor, "rb") as file:
        return np.frombuffer(file.read(reply.num_bytes), np.uint8).copy(), reply.table_bytes


def test_state_arrives_as_it_was():
    state = {
        "header": np.arange(5, dtype=np.uint8),
        "log.0.0.rows": np.arange(12, dtype=np.float16).reshape(3, 4)[:, ::2],
        "\ud800": np.zeros((0, 3), np.int64),
        "": np.array(7.0),
    }
    found = unpack(*packed(state))
    assert list(found) == list(state)
    for name, array in state.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(found[name], array)


TABLES = {
    "garbage": b"\xc1",
    "no list": msgspec.msgpack.encode({}),
    "object": msgspec.msgpack.encode([[b"a", "|O", [1]]]),
    "structured": msgspec.msgpack.encode([[b"a", "f4,f4", [1]]]),
    "larger than the memory": msgspec.msgpack.encode([[b"a", "<f8", [2**62]]]),
    "overflowing": msgspec.msgpack.encode([[b"a", "<f8", [2**61, 2**61, 2**61]]]),
    "negative": msgspec.msgpack.encode([[b"a", "<f8", [-1]]]),
    "many dims": msgspec.msgpack.encode([[b"a", "<f8", [1] * 65]]),
    "no name": msgspec.msgpack.encode([[b"\xff", "<f8", [1]]]),
}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_memory_that_holds_no_state_is_refused(table):
    memory = np.zeros(1024, np.uint8)
    memory[: len(table)] = np.frombuffer(table, np.uint8)
    with pytest.raises(ValueError):
        unpack(memory, len(table))


def test_table_that_is_longer_than_its_memory_is_refused():
    memory, table_bytes = packed({"a": np.zeros(3)})
    with pytest.raises(ValueError):
        unpack(memory[: table_bytes - 1], table_bytes)
    with pytest.raises(ValueError):
        unpack(memory[:-1], table_bytes)
