"""SEMANTICS 9: errors are ours and the built-in's, and pickle with their attributes."""

import concurrent.futures
import copy
import pickle

import numpy as np
import pytest

import gradquorum as gq
from tests.support import accept, apply, only_local

BASES = {
    gq.InvalidArgumentError: ValueError,
    gq.InvalidDTypeError: TypeError,
    gq.DeadlineExceededError: TimeoutError,
    gq.CancelledError: concurrent.futures.CancelledError,
    gq.ClosedError: RuntimeError,
    gq.ResourceExhaustedError: MemoryError,
    gq.UnavailableError: ConnectionError,
}


@pytest.mark.parametrize("error", BASES, ids=lambda error: error.__name__)
def test_error_is_a_gradquorum_error_and_the_built_in_s(error):
    assert issubclass(error, gq.GradQuorumError)
    assert issubclass(error, BASES[error])


def test_invalid_dtype_error_is_an_invalid_argument_error():
    assert issubclass(gq.InvalidDTypeError, gq.InvalidArgumentError)
    assert issubclass(gq.InvalidDTypeError, ValueError)


def test_warning_is_a_user_warning():
    assert issubclass(gq.StaleGradientWarning, UserWarning)
    assert not issubclass(gq.StaleGradientWarning, gq.GradQuorumError)


def _deadline(make):
    make.sparse("float32", (5, 1)).take_grad(3, timeout=0)


def _unavailable(make):
    acc = make.sparse("float32", (5, 1), expected_workers=1, max_per_worker=1)
    acc.worker("w").leave()
    acc.take_grad(1)


def _exhausted(make):
    make.sparse("float32", (5, 1), max_bytes=8).apply_grad([0, 1, 2, 3], np.ones((4, 1), np.float32))


def _closed(make):
    acc = make.sparse("float32", (5, 1))
    acc.close()
    acc.take_grad(1)


def _cancelled(make):
    acc = make.sparse("float32", (5, 1))
    future = acc.submit_take(1)
    acc.close()
    future.result(10)


def _argument(make):
    make.sparse("float32", (5, 1)).apply_grad([9], [[1.0]])


def _dtype(make):
    make.sparse("bool", (5, 1))


RAISERS = {
    gq.DeadlineExceededError: (_deadline, {"have": 0, "need": 3, "step": 0, "num_stale": 0}),
    gq.UnavailableError: (_unavailable, {"outcome_known": True, "live": 0, "needed": 1, "left": ("w",)}),
    gq.ResourceExhaustedError: (_exhausted, {"held_bytes": 0, "max_bytes": 8}),
    gq.ClosedError: (_closed, {}),
    gq.CancelledError: (_cancelled, {}),
    gq.InvalidArgumentError: (_argument, {}),
    gq.InvalidDTypeError: (_dtype, {}),
}


@pytest.mark.parametrize("kind", RAISERS, ids=lambda error: error.__name__)
def test_error_survives_pickling_with_text_and_attributes(make, kind):
    raiser, attributes = RAISERS[kind]
    with pytest.raises(kind) as caught:
        raiser(make)
    error = caught.value
    assert type(error) is kind
    for clone in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(clone) is kind
        assert str(clone) == str(error) != ""
        assert vars(clone) == vars(error)
        for name, value in attributes.items():
            assert getattr(clone, name) == value


def test_receipt_and_status_survive_pickling(make):
    acc = make.sparse("float32", (5, 1))
    acc.set_global_step(4)
    receipts = [accept(acc, [0], [1.0], worker="w", sequence=0), apply(acc, [0], [1.0], local_step=1)]
    receipts.append(apply(acc, [0], [1.0], worker="w", sequence=0))
    for receipt in receipts:
        clone = pickle.loads(pickle.dumps(receipt))
        for name in ("status", "step", "lag", "num_accumulated", "lent", "released", "first_status"):
            assert getattr(clone, name) == getattr(receipt, name)
        assert bool(clone) is bool(receipt)


def test_result_survives_pickling_with_its_attributes(make):
    acc = make.sparse("float32", (5, 1))
    accept(acc, [1, 3], [2.0, 4.0], worker="w")
    taken = acc.take_grad(1, timeout=0)
    for clone in (pickle.loads(pickle.dumps(taken)), copy.deepcopy(taken)):
        for name in ("indices", "values", "shape", "counts"):
            np.testing.assert_array_equal(getattr(clone, name), getattr(taken, name))
        assert (clone.num_gradients, clone.step, clone.workers) == (1, 0, ("w",))


def test_slices_survive_pickling():
    clone = pickle.loads(pickle.dumps(gq.IndexedSlices(np.ones((1, 1)), np.array([3]), [5, 1])))
    np.testing.assert_array_equal(clone.indices, [3])
    assert list(clone.dense_shape) == [5, 1]


@only_local("handles on a server pickle")
def test_local_handle_does_not_pickle_and_names_target(make):
    for made in (make.sparse(), make.dense(), make.group({"x": gq.DenseSpec("float32", (1,))})):
        with pytest.raises(TypeError, match="target="):
            pickle.dumps(made)
