"""The short way through the checks of a sparse gradient lets through what the long way does, as it does, or nothing."""

import numpy as np
import pytest

import gradquorum as gq
from gradquorum.validation import check_sparse, plain_sparse

SPEC = gq.SparseSpec("float32", (9, 4))
IDS, VALUES = np.array([8, 0, 8]), np.ones((3, 4), np.float32)


@pytest.mark.parametrize("spec", [SPEC, gq.SparseSpec("float32", (None, 4)), gq.SparseSpec("float32", None)])
def test_plain_gradient_is_what_the_checks_make_of_it(spec):
    plain = plain_sparse(spec, IDS, VALUES)
    assert plain is not None
    checked, _ = check_sparse(spec, "", IDS, VALUES)
    np.testing.assert_array_equal(plain.indices, checked.indices)
    np.testing.assert_array_equal(plain.values, checked.values)
    assert plain[2:] == checked[2:]


@pytest.mark.parametrize(
    ("ids", "values"),
    [
        pytest.param([8, 0, 8], VALUES, id="a list of ids"),
        pytest.param(IDS, VALUES.tolist(), id="a list of values"),
        pytest.param(IDS.astype(np.int32), VALUES, id="int32 ids"),
        pytest.param(IDS.astype(">i8"), VALUES, id="ids of another byte order"),
        pytest.param(np.repeat(IDS, 2)[::2], VALUES, id="strided ids"),
        pytest.param(IDS[:, None], VALUES, id="ids in two dims"),
        pytest.param(np.frombuffer(b"-" + IDS.tobytes(), np.int64, offset=1), VALUES, id="unaligned ids"),
        pytest.param(IDS, VALUES.astype(np.float64), id="another dtype"),
        pytest.param(IDS, VALUES.astype(">f4"), id="values of another byte order"),
        pytest.param(IDS, np.asfortranarray(VALUES), id="values in another order"),
        pytest.param(IDS, VALUES[:2], id="fewer rows"),
        pytest.param(IDS, VALUES[:, :3], id="another row shape"),
        pytest.param(IDS, np.float32(1), id="a scalar"),
        pytest.param(np.array(1), np.array(1, np.float32), id="0d"),
        pytest.param(IDS[:0], VALUES[:0], id="nothing"),
        pytest.param(np.array([0, 1, 9]), VALUES, id="an id beyond the table"),
        pytest.param(np.array([0, 1, -1]), VALUES, id="a negative id"),
    ],
)
def test_all_others_go_the_long_way(ids, values):
    assert plain_sparse(SPEC, ids, values) is None
