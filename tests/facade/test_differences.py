"""What differs from TensorFlow's class on purpose, side by side, as `docs/from-tensorflow.md` lists it.

Differences of the accumulators themselves are in `tests/parity/test_live_tensorflow.py`, by session, too.
"""

import re
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import gradquorum as gq

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::gradquorum.StaleGradientWarning"),
]


@pytest.fixture(params=["eager", "graph"])
def offer_and_take(request, tf):
    """Return what offers gradients `(ids, values, options)` to a class and takes them: rows, or the error."""
    v1 = tf.compat.v1

    def run_in_graph(classes, gradients, num_required, kind, arguments):
        with v1.Graph().as_default(), v1.Session() as session:
            acc = getattr(classes, kind)(**arguments)
            applies = [acc.apply_grad(*gradient[:-1], **gradient[-1]) for gradient in gradients]
            take = acc.take_grad(num_required)
            try:
                for apply in applies:
                    session.run(apply)
                return session.run(take)
            except tf.errors.InvalidArgumentError as error:
                return error

    def run(classes, gradients, num_required=1, kind="SparseConditionalAccumulator", **arguments):
        arguments = {"dtype": tf.float32, **arguments}
        gradients = [gradient if isinstance(gradient[-1], dict) else (*gradient, {}) for gradient in gradients]
        if request.param == "graph" or classes is v1:  # TensorFlow's own has no eager mode
            result = run_in_graph(classes, gradients, num_required, kind, arguments)
        else:
            acc = getattr(classes, kind)(**arguments)
            try:
                for gradient in gradients:
                    acc.apply_grad(*gradient[:-1], **gradient[-1])
                result = acc.take_grad(num_required)
            except tf.errors.InvalidArgumentError as error:
                return error
        if isinstance(result, tuple):
            return list(zip(np.asarray(result[0]).tolist(), np.asarray(result[1]).ravel().tolist(), strict=True))
        return result

    return run


def test_repeated_ids(tf, gqtf, offer_and_take):
    gradients = [([1, 1], [[1.0], [3.0]])]
    assert offer_and_take(tf.compat.v1, gradients) == [(1, 1.0), (1, 3.0)]
    assert offer_and_take(gqtf, gradients) == [(1, 4.0)]


def test_unsorted_ids(tf, gqtf, offer_and_take):
    gradients = [([3, 1], [[30.0], [10.0]]), ([1, 3], [[1.0], [3.0]])]
    assert offer_and_take(tf.compat.v1, gradients, 2) == [(1, 1.0), (3, 16.5), (1, 10.0)]
    assert offer_and_take(gqtf, gradients, 2) == [(1, 5.5), (3, 16.5)]


def test_negative_ids(tf, gqtf, offer_and_take):
    gradients = [([-1], [[1.0]])]
    assert offer_and_take(tf.compat.v1, gradients) == [(-1, 1.0)]
    assert "index of slice 0 is negative" in str(offer_and_take(gqtf, gradients))


def test_stale_gradient_with_a_fault(tf, gqtf, offer_and_take):
    gradients = [([1], [[1.0]]), ([77], [[1.0]], {"local_step": -1})]
    assert offer_and_take(tf.compat.v1, gradients, shape=[5, 1]) == [(1, 1.0)]
    assert "exceeded limits of shape" in str(offer_and_take(gqtf, gradients, shape=[5, 1]))


def test_grad_shape_that_contradicts_the_values_where_none_is_declared(tf, gqtf, offer_and_take):
    gradients = [([1], [[1.0]], {"grad_shape": [5, 3]})]
    assert offer_and_take(tf.compat.v1, gradients) == [(1, 1.0)]
    assert "expected values dim 1 to be 3, got 1" in str(offer_and_take(gqtf, gradients))


def test_unknown_dims_in_grad_shape(tf, gqtf, offer_and_take):
    gradients = [([1], [[1.0]], {"grad_shape": [-1, 1]})]
    theirs = offer_and_take(tf.compat.v1, gradients, shape=[5, 1])
    assert "expected shape dim 0 to be 5, got -1" in str(theirs)
    assert offer_and_take(gqtf, gradients, shape=[5, 1]) == [(1, 1.0)]


def test_subnormals(tf, gqtf, offer_and_take):
    small = float(np.finfo(np.float32).smallest_normal)
    gradients = [([1], [[small]]), ([1], [[-small / 2]])]
    assert offer_and_take(tf.compat.v1, gradients, 2) == [(1, 0.0)]
    assert offer_and_take(gqtf, gradients, 2) == [(1, small / 4)]


def test_half_precision_sums(tf, gqtf, offer_and_take):
    gradients = [([1], np.float16([[40000]]))] * 2
    assert offer_and_take(tf.compat.v1, gradients, 2, dtype=tf.float16) == [(1, np.inf)]
    assert offer_and_take(gqtf, gradients, 2, dtype=tf.float16) == [(1, 40000.0)]


def test_float_ids(tf, gqtf, offer_and_take):
    assert offer_and_take(tf.compat.v1, [([3.7], [[1.0]])]) == [(3, 1.0)]
    try:
        refused = offer_and_take(gqtf, [([3.7], [[1.0]])])
    except TypeError as error:  # in a graph, when it is built
        refused = error
    assert "expected integers, got float" in str(refused)


@pytest.mark.parametrize(
    ("ids", "options"),
    [(["1"], {}), ([1], {"local_step": "0"}), ([1], {"grad_shape": ["5", "1"]})],
    ids=["ids", "local_step", "grad_shape"],
)
def test_strings_for_integers(tf, gqtf, offer_and_take, ids, options):
    gradients = [(ids, [[1.0]], options)]
    with pytest.raises(tf.errors.UnimplementedError, match="Cast string to int64 is not supported"):
        offer_and_take(tf.compat.v1, gradients)
    try:
        refused = offer_and_take(gqtf, gradients)
    except TypeError as error:  # in a graph, when it is built
        refused = error
    assert re.search("expected (an integer|integers), got", str(refused))


@pytest.mark.parametrize("grad_shape", [5, [[5, 1]]])
def test_grad_shape_that_is_no_vector(tf, gqtf, offer_and_take, grad_shape):
    gradients = [([1], [[1.0]], {"grad_shape": grad_shape})]
    assert offer_and_take(tf.compat.v1, gradients) == [(1, 1.0)]
    assert re.search(r"grad_shape(\[0\] must be scalar|: expected a vector)", str(offer_and_take(gqtf, gradients)))


@pytest.mark.parametrize(
    ("arguments", "kind", "theirs", "ours"),
    [
        ({"dtype": "string"}, TypeError, "DataType string not in list of allowed values", "expected one of float16"),
        ({"reduction_type": "MAX"}, ValueError, "Attr 'reduction_type' of", r"expected one of \('MEAN'"),
    ],
)
def test_words_of_a_dtype_or_reduction_type_that_cannot_be(tf, gqtf, offer_and_take, arguments, kind, theirs, ours):
    with pytest.raises(kind, match=theirs):
        offer_and_take(tf.compat.v1, [([1], [[1.0]])], **arguments)
    with pytest.raises((kind, tf.errors.InvalidArgumentError), match=ours):
        offer_and_take(gqtf, [([1], [[1.0]])], **arguments)


def test_eager_mode(tf, gqtf):
    with pytest.raises(RuntimeError, match="does not support eager execution"):
        tf.compat.v1.SparseConditionalAccumulator(tf.float32)
    assert int(gqtf.SparseConditionalAccumulator(tf.float32).num_accumulated()) == 0


def test_default_local_step_that_would_hang_is_warned_about(tf, gqtf):
    acc = gqtf.SparseConditionalAccumulator(tf.float32)
    acc.apply_grad([1], [[1.0]])
    acc.take_grad(1)
    with pytest.warns(gq.StaleGradientWarning):
        acc.apply_grad([1], [[1.0]])
    assert int(acc.num_accumulated()) == 0

    v1 = tf.compat.v1
    with v1.Graph().as_default(), v1.Session() as session:
        theirs = v1.SparseConditionalAccumulator(tf.float32)
        apply, take, count = theirs.apply_grad([1], [[1.0]]), theirs.take_grad(1), theirs.num_accumulated()
        session.run(apply)
        session.run(take)
        session.run(apply)  # dropped without a word
        assert session.run(count) == 0


def test_name_in_eager_mode(tf, gqtf):
    assert tf.compat.v1.ConditionalAccumulator(tf.float32, name="scope/Q").name == ""
    assert gqtf.ConditionalAccumulator(tf.float32, name="scope/Q").name == "Q"


def test_shared_name_with_another_spec(tf, gqtf):
    keep = gqtf.SparseConditionalAccumulator(tf.float32, [5, 1], shared_name="test-difference")
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"float32.*float64"):
        gqtf.SparseConditionalAccumulator(tf.float64, [5, 1], shared_name="test-difference")
    assert int(keep.num_accumulated()) == 0

    v1 = tf.compat.v1
    with v1.Graph().as_default(), v1.Session() as session:
        one = v1.SparseConditionalAccumulator(tf.float32, [5, 1], shared_name="q")
        two = v1.SparseConditionalAccumulator(tf.float64, [7, 1], shared_name="q")
        session.run(one.apply_grad([1], [[1.0]]))
        assert session.run(two.num_accumulated()) == 1  # attached, whatever it is


def test_empty_gradient_of_any_row_shape(tf, gqtf, offer_and_take):
    gradients = [([1], [[1.0]]), (np.zeros(0, np.int64), np.zeros(0, np.float32))]
    theirs = offer_and_take(tf.compat.v1, gradients, 2, shape=[5, 1])
    assert "expected values rank 2, got 1" in str(theirs)
    assert offer_and_take(gqtf, gradients, 2, shape=[5, 1]) == [(1, 1.0)]


def test_dense_shape_of_no_dims_is_no_constraint_in_eager_mode_only(tf, gqtf, offer_and_take, request):
    options = {"kind": "ConditionalAccumulator", "shape": []}
    with pytest.raises(ValueError, match="incompatible"):
        offer_and_take(tf.compat.v1, [([1.0, 2.0],)], **options)
    if "[eager]" in request.node.name:
        assert offer_and_take(gqtf, [([1.0, 2.0],)], **options).numpy().tolist() == [1.0, 2.0]
    else:
        with pytest.raises(ValueError, match="incompatible"):
            offer_and_take(gqtf, [([1.0, 2.0],)], **options)


def test_values_of_another_dtype_end_tensorflows_process(tf, gqtf):
    script = textwrap.dedent(
        """
        import numpy as np, tensorflow as tf
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            acc = tf.compat.v1.SparseConditionalAccumulator(tf.float32)
            apply = acc.apply_grad([1], np.ones((1, 1), np.uint64))
            session.run(apply)
            session.run(apply)
        print("alive")
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode != 0
    assert "alive" not in done.stdout
    acc = gqtf.SparseConditionalAccumulator(tf.float32)
    for _ in range(2):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"float32.*uint64"):
            acc.apply_grad([1], np.ones((1, 1), np.uint64))


@pytest.mark.parametrize("name", ["bfloat16", "complex64", "complex128"])
def test_dtypes_for_which_tensorflow_has_no_kernel(tf, gqtf, offer_and_take, name):
    gradients = [([1], tf.constant([[2]], tf.as_dtype(name)).numpy())]
    assert "No OpKernel was registered" in str(offer_and_take(tf.compat.v1, gradients, dtype=name))
    ((row, value),) = offer_and_take(gqtf, gradients, dtype=name)
    assert (row, complex(value)) == (1, 2)


def test_integers_with_sum(tf, gqtf, offer_and_take):
    gradients = [([1], np.int64([[2]]))] * 2
    options = {"dtype": tf.int64, "reduction_type": "SUM", "num_required": 2}
    assert "No OpKernel was registered" in str(offer_and_take(tf.compat.v1, gradients, **options))
    assert offer_and_take(gqtf, gradients, **options) == [(1, 4)]


def test_mean_by_count(tf, gqtf, offer_and_take):
    gradients = [([1], [[2.0]]), ([2], [[2.0]])]
    options = {"num_required": 2, "reduction_type": "MEAN_BY_COUNT"}
    with pytest.raises(ValueError, match="MEAN_BY_COUNT"):
        offer_and_take(tf.compat.v1, gradients, **options)
    assert offer_and_take(gqtf, gradients, **options) == [(1, 1.0), (2, 1.0)]


def test_local_step_of_one_entry(tf, gqtf, in_graph):
    v1 = tf.compat.v1
    counts = []
    with in_graph.build():
        made = [classes.SparseConditionalAccumulator(tf.float32) for classes in (v1, gqtf)]
        step = v1.placeholder(tf.int64)
        ops = [(acc.apply_grad([1], [[1.0]], local_step=step), acc.num_accumulated()) for acc in made]
    with in_graph.session() as session:
        for apply, count in ops:
            with pytest.raises(tf.errors.InvalidArgumentError, match="local_step must be scalar"):
                session.run(apply, {step: [3]})
            counts.append(int(session.run(count)))
    assert counts == [1, 0]


@pytest.mark.parametrize("reduction_type", [None, b"MEAN"])
def test_reduction_type_that_is_no_string(tf, gqtf, offer_and_take, reduction_type):
    gradients, options = [([1], [[2.0]])] * 2, {"num_required": 2, "reduction_type": reduction_type}
    assert offer_and_take(tf.compat.v1, gradients, **options) == [(1, 2.0)]  # the default
    try:
        refused = offer_and_take(gqtf, gradients, **options)
    except (ValueError, tf.errors.InvalidArgumentError) as error:
        refused = error
    assert "reduction_type: expected one of ('MEAN', 'SUM'" in str(refused)


def test_shape_of_one_dimension_as_a_number_is_no_difference(tf, gqtf, offer_and_take):
    for classes in (tf.compat.v1, gqtf):
        assert "index is 5 exceeded 5" in str(offer_and_take(classes, [([5], [1.0])], shape=5))
