"""The same against TensorFlow itself, on other programs; and where the two differ on purpose."""

import numpy as np
import pytest

from tests.parity.conftest import CHUNK
from tests.parity.programs import Program, from_plain, to_plain
from tests.parity.replay import GradQuorumAdapter

SEED = 7
NUM_PROGRAMS = 156

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::gradquorum.StaleGradientWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorflow"),
]


@pytest.mark.parametrize("start", range(0, NUM_PROGRAMS, CHUNK))
def test_live_programs_give_the_same_bits(start, live, make):
    live.check_chunk(start, lambda program: GradQuorumAdapter(make, program))


# Where we differ on purpose. Each test shows both sides, so that a TensorFlow that changes is noticed.


class Both:
    """One accumulator here and one in TensorFlow, driven by hand."""

    def __init__(self, graphs, make, shape, dtype="float32", reduction="MEAN", kind="sparse"):
        self._program = Program(0, kind, dtype, shape, reduction, [])
        self._theirs = graphs.adapter(self._program)
        self._ours = GradQuorumAdapter(make, self._program)

    def close(self):
        self._theirs.__exit__()
        self._ours.__exit__()

    def apply(self, ids, values, grad_shape=None, local_step=0):
        """Offer a gradient (a dense one has no use for ids) and return the two errors, or None: (theirs, ours)."""
        values = to_plain(np.array(values, self._program.dtype))
        step = {"ids": ids, "values": values, "grad_shape": grad_shape, "local_step": local_step}
        return tuple(side.apply(step).get("error") for side in (self._theirs, self._ours))

    def take(self):
        """Return the two results as [(id, row), ...]: (theirs, ours)."""
        results = [side.take({"num_required": 1}) for side in (self._theirs, self._ours)]
        return tuple(
            list(zip(result["ids"], from_plain(self._program.dtype, result["values"]).tolist(), strict=True))
            for result in results
        )

    def count(self):
        return self._theirs.count(), self._ours.count()

    def set_step(self, step):
        self._theirs.set_step({"step": step})
        self._ours.set_step({"step": step})


@pytest.fixture
def both(graphs, make):
    opened = []

    def build(*args, **options):
        opened.append(Both(graphs, make, *args, **options))
        return opened[-1]

    yield build
    for pair in opened:
        pair.close()


def test_repeated_ids_tensorflow_returns_them_several_times_we_sum(both):
    pair = both([4, 1])
    assert pair.apply([1, 1], [[1], [3]]) == (None, None)
    theirs, ours = pair.take()
    assert theirs == [(1, [1.0]), (1, [3.0])]
    assert ours == [(1, [4.0])]


def test_unsorted_ids_tensorflow_gives_wrong_means_we_sort(both):
    pair = both([5, 1])
    assert pair.apply([3, 1], [[30], [10]]) == (None, None)
    assert pair.apply([1, 3], [[1], [3]]) == (None, None)
    theirs, ours = pair.take()
    assert theirs == [(1, [1.0]), (3, [16.5]), (1, [10.0])]
    assert ours == [(1, [5.5]), (3, [16.5])]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_subnormals_tensorflow_flushes_them_we_keep_them(both, dtype):
    small = float(np.finfo(dtype).smallest_normal)
    pair = both([5, 1], dtype=dtype)
    assert pair.apply([1], [[small]]) == (None, None)
    assert pair.apply([1], [[-small / 2]]) == (None, None)
    theirs, ours = pair.take()
    assert theirs == [(1, [0.0])]
    assert ours == [(1, [small / 4])]


def test_negative_id_tensorflow_takes_it_we_refuse(both):
    pair = both([5, 1])
    theirs, ours = pair.apply([-1, 2], [[1], [2]])
    assert theirs is None
    assert "index of slice 0 is negative" in ours
    assert "-1" in ours
    assert pair.count() == (1, 0)


@pytest.mark.parametrize(
    ("ids", "values", "message"),
    [
        ([77], [[1]], "exceeded limits of shape"),
        ([[1]], [[1]], "Input indices should be vector"),
        ([1, 2], [[1]], "Expected 2 non-empty input values, got 1"),
        ([1], [[1, 2]], "expected values dim 1 to be 1, got 2"),
    ],
)
def test_stale_gradient_with_a_fault_tensorflow_does_not_look_we_refuse(both, ids, values, message):
    pair = both([5, 1])
    pair.set_step(3)
    theirs, ours = pair.apply(ids, values, local_step=2)
    assert theirs is None
    assert message in ours
    assert pair.count() == (0, 0)


def test_local_step_of_one_entry_tensorflow_reports_and_counts_we_change_nothing(both):
    pair = both([5, 1])
    theirs, ours = pair.apply([1], [[1]], local_step=[0])
    assert "local_step must be scalar" in theirs
    assert "local_step must be scalar" in ours
    assert pair.count() == (1, 0)


def test_empty_gradient_of_any_row_shape_tensorflow_refuses_we_take_it(both):
    pair = both([5, 2])
    theirs, ours = pair.apply([], [])
    assert theirs == "Shape mismatch: expected values rank at least 2, got 1"
    assert ours is None
    assert pair.count() == (0, 1)


def test_grad_shape_with_unknown_dims_tensorflow_compares_minus_one_we_do_not(both):
    pair = both([5, 2])
    theirs, ours = pair.apply([1], [[1, 2]], grad_shape=[-1, 2])
    assert theirs == "Shape mismatch: expected shape dim 0 to be 5, got -1"
    assert ours is None


@pytest.mark.parametrize(
    ("ids", "grad_shape", "message"),
    [
        ([1], [6, 2], "Shape mismatch: expected values dim 1 to be 2, got 3"),
        ([7], [6, 3], "Shape mismatch: index of slice 0 exceeded limits of shape; index is 7 exceeded 6"),
    ],
)
def test_grad_shape_without_declared_shape_tensorflow_ignores_it_we_check(both, ids, grad_shape, message):
    pair = both(None)
    theirs, ours = pair.apply(ids, [[1, 2, 3]], grad_shape=grad_shape)
    assert theirs is None
    assert message in ours
    assert pair.count() == (1, 0)


def test_dense_shape_of_no_dims_tensorflow_means_scalars_we_mean_no_constraint(both):
    pair = both([], kind="dense")
    theirs, ours = pair.apply(None, [1, 2])
    assert theirs == "Shape mismatch: expected [], got [2]"
    assert ours is None
    assert pair.count() == (0, 1)
