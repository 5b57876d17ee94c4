"""`tf.function`: program order, one accumulator for all traces, and waits that hold no thread."""

import threading

import numpy as np
import pytest

import gradquorum as gq
from tests.support import TIMEOUT, wait_for_waiters, wait_until

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.mark.filterwarnings("ignore::gradquorum.StaleGradientWarning")
def test_operations_run_in_program_order_also_in_a_loop(tf, gqtf):
    acc = gqtf.SparseConditionalAccumulator(tf.float32, shape=[5, 1])

    @tf.function
    def rounds(number):
        total = tf.constant(0.0)
        for step in tf.range(number):
            acc.apply_grad([1, 1], [[1.0], [2.0]], local_step=step)
            acc.apply_grad([1], [[5.0]], local_step=step)
            acc.apply_grad([1], [[100.0]], local_step=step - 1)
            values = acc.take_grad(2).values
            total += tf.reduce_sum(values)
        return total

    for _ in range(2):
        assert float(rounds(tf.constant(20))) == 80.0
        acc.set_global_step(0)


def test_retracing_makes_no_second_accumulator(tf, gqtf):
    @tf.function
    def offer(ids, values):
        acc = gqtf.SparseConditionalAccumulator(tf.float32, shared_name="test-retracing")
        acc.apply_grad(ids, values)
        return acc.num_accumulated()

    assert int(offer(tf.constant([1]), tf.constant([[1.0]]))) == 1
    assert int(offer(tf.constant([1, 2]), tf.constant([[1.0], [2.0]]))) == 2
    assert offer.experimental_get_tracing_count() == 2


def test_accumulator_made_in_a_function_without_a_shared_name_is_refused(tf, gqtf):
    @tf.function
    def make():
        gqtf.SparseConditionalAccumulator(tf.float32)

    with pytest.raises(ValueError, match="make it outside, or give it a shared_name"):
        make()


def test_tensorflows_own_dense_one_is_another_for_each_trace(tf):
    """Why ours is refused without a shared name."""

    @tf.function
    def offer(value):
        acc = tf.compat.v1.ConditionalAccumulator(tf.float32)
        acc.apply_grad(value)
        return acc.num_accumulated()

    assert int(offer(tf.ones([1]))) == 1
    assert int(offer(tf.ones([1]))) == 2
    assert int(offer(tf.ones([2]))) == 1


@pytest.mark.parametrize("waiting", [1, 16])
def test_waiting_takes_hold_no_thread_that_an_apply_needs(tf, gqtf, run_thread, waiting):
    acc = gqtf.SparseConditionalAccumulator(tf.float32)

    @tf.function(input_signature=[])
    def take():
        return acc.take_grad(1).values

    @tf.function(input_signature=[tf.TensorSpec([], tf.int64)])
    def offer(step):
        acc.apply_grad([1], [[1.0]], local_step=step)

    takes = [run_thread(take) for _ in range(waiting)]
    wait_for_waiters(acc.accumulator_ref, waiting)
    for step in range(waiting):
        offer(np.int64(step))
    assert [call.result().numpy().tolist() for call in takes] == [[[1.0]]] * waiting


@pytest.mark.parametrize(
    ("ids", "values", "words"),
    [
        ([9], [[1.0]], "index of slice 0 exceeded limits of shape; index is 9 exceeded 5"),
        ([1], [[1.0, 2.0]], "expected values dim 1 to be 1, got 2"),
        ([-1], [[1.0]], "index of slice 0 is negative"),
    ],
)
def test_refusals_are_invalid_argument_errors_with_tensorflows_words(tf, gqtf, ids, values, words):
    acc = gqtf.SparseConditionalAccumulator(tf.float32, shape=[5, 1])

    @tf.function
    def offer():
        acc.apply_grad(ids, values)

    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        offer()
    assert int(acc.num_accumulated()) == 0

    @tf.function
    def take():
        return acc.take_grad(0)

    with pytest.raises(tf.errors.InvalidArgumentError, match="num_required must be positive, but was 0"):
        take()


def test_take_when_closed_meanwhile_is_cancelled_with_the_words(tf, gqtf, run_thread):
    acc = gqtf.SparseConditionalAccumulator(tf.float32)
    taking = run_thread(tf.function(lambda: acc.take_grad(1).values))
    wait_for_waiters(acc.accumulator_ref, 1)
    acc.accumulator_ref.close()
    error = taking.error()
    assert isinstance(error, tf.errors.CancelledError)
    assert "TakeGrad operation was cancelled" in error.message
    wait = acc._backend._operations._wait
    assert not wait._queues


def test_call_of_a_closed_accumulator_ends_as_unknown_error_with_the_words(tf, gqtf):
    """A Python function can raise only a few of TensorFlow's classes; an eager call raises FailedPreconditionError."""
    acc = gqtf.SparseConditionalAccumulator(tf.float32)
    acc.accumulator_ref.close()
    with pytest.raises(tf.errors.FailedPreconditionError, match="closed"):
        acc.num_accumulated()
    with pytest.raises(tf.errors.UnknownError, match="closed"):
        tf.function(lambda: acc.num_accumulated())()


def test_wrong_dtype_is_refused_when_the_function_is_traced(tf, gqtf):
    acc = gqtf.SparseConditionalAccumulator(tf.float32)

    @tf.function
    def offer(values):
        acc.apply_grad([1], values)

    with pytest.raises(TypeError, match="expected float32, got float64"):
        offer(tf.ones([1, 1], tf.float64))


def test_eager_accumulator_in_a_graph_of_tensorflow_1_is_refused(tf, gqtf, in_graph):
    acc = gqtf.SparseConditionalAccumulator(tf.float32)
    with in_graph.build(), pytest.raises(gq.InvalidArgumentError, match="make it while that graph is the default"):
        acc.num_accumulated()


def test_takes_have_the_static_shapes_that_optimizers_read(tf, gqtf):
    def shapes(declared):
        acc = gqtf.SparseConditionalAccumulator(tf.float32, declared)
        return [
            output.shape.as_list() if output.shape.rank is not None else None
            for output in tf.function(lambda: acc.take_grad(1)).get_concrete_function().outputs
        ]

    assert shapes([5, 2]) == [[None], [None, 2], [None]]
    assert shapes([None, None, 3]) == [[None], [None, None, 3], [None]]
    assert shapes(None) == [[None], None, [None]]


def test_keras_optimizer_updates_the_rows_of_a_take(tf, gqtf):
    keras = pytest.importorskip("keras")
    table, optimizer = keras.Variable(np.ones((5, 2), np.float32)), keras.optimizers.RMSprop(0.1)
    optimizer.build([table])
    acc = gqtf.SparseConditionalAccumulator(tf.float32, [5, 2])

    @tf.function
    def step():
        acc.apply_grad([1, 3, 1], [[1.0, 2.0]] * 3)
        optimizer.apply_gradients([(acc.take_indexed_slices_grad(1), table)])

    step()
    assert np.flatnonzero(np.any(table.numpy() != 1, axis=1)).tolist() == [1, 3]


def test_number_that_is_no_integer_is_refused_when_the_function_is_traced(tf, gqtf):
    acc = gqtf.SparseConditionalAccumulator(tf.float32)
    acc.apply_grad([1], [[1.0]])
    with pytest.raises(TypeError, match="num_required: expected integers, got float32"):
        tf.function(lambda: acc.take_grad(1.7))()
    assert int(acc.num_accumulated()) == 1


@pytest.mark.parametrize("place", ["function", "loop", "nested"])
def test_take_that_is_cut_off_by_an_error_elsewhere_leaves_its_line(tf, gqtf, run_thread, place):
    acc = gqtf.SparseConditionalAccumulator(tf.float32)
    fail = threading.Event()

    def failing(_):
        assert fail.wait(TIMEOUT)
        raise ValueError("injected")

    def take():
        return acc.take_grad(1).values

    def in_a_loop():
        total = tf.constant(0.0)
        for _ in tf.range(3):
            total += tf.reduce_sum(take())
        return total

    inner = {"function": take, "loop": in_a_loop, "nested": tf.function(take)}[place]

    @tf.function
    def both(number):
        bad = tf.numpy_function(failing, [number], tf.float32, stateful=False)  # at the same time as the take
        return inner() + bad

    for value in (1.0, 2.0):
        running = run_thread(both, tf.constant(value))
        wait_for_waiters(acc.accumulator_ref, 1)
        fail.set()
        assert "injected" in str(running.error())
        acc.apply_grad([1], [[value]], local_step=None)
        assert int(acc.num_accumulated()) == 1
        assert acc.take_grad(1).values.numpy().tolist() == [[value]]
        fail.clear()


def test_round_that_nobody_fetches_goes_back(tf, gqtf, run_thread):
    """The error comes when the round is there, but the operation that fetches it has not run."""
    acc = gqtf.SparseConditionalAccumulator(tf.float32)
    offers = acc._backend._operations._offers
    come, fail = threading.Event(), threading.Event()

    def ended(number):  # and the queue is not fed
        come.set()

    offers._listener.ended = ended

    def failing(_):
        assert fail.wait(TIMEOUT)
        raise ValueError("injected")

    @tf.function
    def both(number):
        return acc.take_grad(1).values + tf.numpy_function(failing, [number], tf.float32, stateful=False)

    running = run_thread(both, tf.constant(1.0))
    wait_for_waiters(acc.accumulator_ref, 1)
    acc.apply_grad([1], [[5.0]])
    assert come.wait(TIMEOUT)
    fail.set()
    assert "injected" in str(running.error())
    acc.apply_grad([1], [[6.0]], local_step=1)
    assert [acc.take_grad(1).values.numpy().tolist() for _ in range(2)] == [[[5.0]], [[6.0]]]


def test_round_that_was_read_when_the_run_had_failed_goes_back(tf, gqtf, run_thread, monkeypatch):
    acc = gqtf.SparseConditionalAccumulator(tf.float32)
    wait, reading, go_on = acc._backend._operations._wait, threading.Event(), threading.Event()
    read = type(wait)._read

    def slow(*arguments):
        result = read(wait, *arguments)
        reading.set()
        assert go_on.wait(TIMEOUT)
        return result

    queue = tf.queue.FIFOQueue(1, tf.float32, [[]])

    @tf.function
    def both():
        return queue.dequeue() + acc.take_grad(1).values

    with monkeypatch.context() as patch:
        patch.setattr(wait, "_read", slow)
        running = run_thread(both)
        acc.apply_grad([1], [[5.0]])
        assert reading.wait(TIMEOUT)
        queue.close()  # the operation fails before this returns, and with it the run
        go_on.set()
        assert isinstance(running.error(), tf.errors.OutOfRangeError)
    acc.apply_grad([1], [[6.0]], local_step=1)
    assert [acc.take_grad(1).values.numpy().tolist() for _ in range(2)] == [[[5.0]], [[6.0]]]


def test_takes_leave_no_queues_behind(tf, gqtf):
    acc = gqtf.SparseConditionalAccumulator(tf.float32)

    @tf.function
    def both(step):
        acc.apply_grad([1], [[1.0]], local_step=step)
        return acc.take_grad(1).values

    for step in range(3):
        both(tf.constant(step))
    wait = acc._backend._operations._wait
    wait_until(lambda: not acc._backend._operations._offers._takes)
    assert (len(wait._queues), len(wait._dead)) == (0, 0)
