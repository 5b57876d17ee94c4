"""What the demo computes: vocabulary, pairs, the loss and its gradients, the update; the training by threads."""

from __future__ import annotations

import threading
from itertools import islice

import numpy as np
import pytest

import gradquorum as gq
from gradquorum.cli.corpus import MAX_BYTES, Corpus, TextError, python_documentation, read_text
from gradquorum.cli.training import Examples, Settings, Training
from gradquorum.cli.word_vectors import Adagrad, Batch, NegativeSampler, WordVectors

NUM_WORDS, DIM = 7, 5


@pytest.fixture
def vectors() -> WordVectors:
    rng = np.random.default_rng(3)
    vectors = WordVectors(NUM_WORDS, DIM, rng)
    vectors.input = rng.normal(size=(NUM_WORDS, DIM))  # float64, for finite differences
    vectors.output = rng.normal(size=(NUM_WORDS, DIM))
    return vectors


@pytest.fixture
def batch() -> Batch:
    """A batch with repeated ids, within a row as well, and with ids in no order."""
    return Batch(np.array([4, 1, 4, 0]), np.array([[2, 6, 6], [5, 1, 2], [2, 0, 3], [6, 2, 6]]))


@pytest.mark.parametrize("table", ["input", "output"])
def test_gradients_when_repeats_are_summed_equal_finite_differences(vectors, batch, table):
    indices, rows = vectors.gradients(batch)[table]
    summed = np.zeros((NUM_WORDS, DIM))
    np.add.at(summed, indices, rows)
    values, expected, epsilon = getattr(vectors, table), np.zeros((NUM_WORDS, DIM)), 1e-6
    for at in np.ndindex(values.shape):
        value = values[at]
        values[at] = value + epsilon
        above = vectors.loss(batch)
        values[at] = value - epsilon
        expected[at] = (above - vectors.loss(batch)) / (2 * epsilon)
        values[at] = value
    np.testing.assert_allclose(summed, expected, rtol=1e-5, atol=1e-9)


def test_gradients_when_made_are_raw(vectors, batch):
    gradients = vectors.gradients(batch)
    np.testing.assert_array_equal(gradients["input"][0], [4, 1, 4, 0])
    np.testing.assert_array_equal(gradients["output"][0], [2, 6, 6, 5, 1, 2, 2, 0, 3, 6, 2, 6])
    assert gradients["output"][1].shape == (12, DIM)


def test_gradients_when_tables_are_float32_are_float32():
    vectors = WordVectors(NUM_WORDS, DIM, np.random.default_rng(0))
    sampler = NegativeSampler(np.arange(NUM_WORDS, 0, -1))
    gradients = vectors.gradients(sampler.batch(np.array([[0, 1], [2, 3]]), np.random.default_rng(0)))
    assert {rows.dtype for _, rows in gradients.values()} == {np.dtype(np.float32)}


def test_gradients_when_scores_are_huge_are_finite(vectors, batch):
    vectors.input *= 1e4
    vectors.output *= 1e4
    assert np.isfinite(vectors.loss(batch))
    assert all(np.isfinite(rows).all() for _, rows in vectors.gradients(batch).values())


def test_adagrad_when_updating_changes_only_the_rows_given():
    table = np.ones((4, 2), np.float32)
    adagrad = Adagrad(table, learning_rate=0.5)
    rows = np.array([[3.0, -4.0]], np.float32)
    adagrad.update(np.array([2]), rows)
    np.testing.assert_allclose(table[2], [0.5, 1.5])  # the first step is the learning rate, whatever the size
    adagrad.update(np.array([2]), rows)
    np.testing.assert_allclose(table[2], [0.5 - 0.5 / np.sqrt(2), 1.5 + 0.5 / np.sqrt(2)], rtol=1e-6)
    np.testing.assert_array_equal(table[[0, 1, 3]], 1)


def test_adagrad_when_a_gradient_is_zero_leaves_the_row():
    table = np.ones((2, 2), np.float32)
    Adagrad(table, learning_rate=0.5).update(np.array([0]), np.zeros((1, 2), np.float32))
    np.testing.assert_array_equal(table, 1)


def test_nearest_when_asked_orders_by_cosine_and_leaves_the_word_out(vectors):
    vectors.input = np.array([[1.0, 0], [-1, 0], [9, 1], [1, 2], [-1, -2], [-9, -1]])
    assert vectors.nearest(0, 2) == [2, 3]
    assert len(vectors.nearest(0, 100)) == 5


def test_sampler_when_drawing_follows_the_counts():
    counts = np.array([1000, 100, 10, 1])
    pairs = np.zeros((20_000, 2), np.int64)
    batch = NegativeSampler(counts).batch(pairs, np.random.default_rng(0))
    drawn = np.bincount(batch.targets[:, 1:].ravel(), minlength=4) / (5 * len(pairs))
    np.testing.assert_allclose(drawn, counts**0.75 / (counts**0.75).sum(), atol=0.005)
    np.testing.assert_array_equal(batch.targets[:, 0], 0)


def test_batches_when_gone_through_are_full_and_do_not_repeat_a_pair_within_an_epoch():
    pairs = np.stack([np.arange(10), np.arange(10)], 1)
    batches = NegativeSampler(np.ones(10, np.int64)).batches(pairs, 4, np.random.default_rng(0))
    first, second, third = (batch.centers for batch in islice(batches, 3))
    assert len(set(first) | set(second)) == 8
    assert len(third) == 4


def test_corpus_when_made_numbers_words_by_frequency():
    text = " ".join(f"word_{i:02d} " * (40 - i) for i in range(30)) + " Word_00 once x 7 3.5"
    corpus = Corpus.from_text(text)
    assert corpus.words == [f"word_{i:02d}" for i in range(30)]
    np.testing.assert_array_equal(corpus.counts, [41, *range(39, 10, -1)])
    np.testing.assert_array_equal(np.bincount(corpus.ids), corpus.counts)


RARE_WORDS = " ".join(f"word{i}" for i in range(5000))


@pytest.mark.parametrize("text", ["", "one two three", "spam " * 5000, RARE_WORDS])
def test_corpus_when_there_are_too_few_words_raises(text):
    with pytest.raises(TextError, match="too short"):
        Corpus.from_text(text)


def test_pairs_when_drawn_are_close_and_symmetric_in_distance():
    corpus = Corpus([f"w{i}" for i in range(1000)], np.ones(1000, np.int64), np.arange(1000))
    pairs = corpus.skip_gram_pairs(np.random.default_rng(0), window=3)
    distances, counts = np.unique(pairs[:, 1] - pairs[:, 0], return_counts=True)
    np.testing.assert_array_equal(distances, [-3, -2, -1, 1, 2, 3])
    np.testing.assert_array_equal(counts, counts[::-1])
    np.testing.assert_allclose(counts[3:], [1000, 667, 333], atol=60)


def test_pairs_when_a_word_is_frequent_leave_most_of_it_out():
    rng = np.random.default_rng(0)
    ids = np.where(rng.random(20_000) < 0.5, 0, rng.integers(1, 2000, 20_000))
    corpus = Corpus([f"w{i}" for i in range(2000)], np.bincount(ids, minlength=2000) + 1, ids)
    pairs = corpus.skip_gram_pairs(rng)
    assert 0.01 < np.mean(pairs[:, 0] == 0) < 0.1


def test_training_when_on_one_batch_lowers_its_loss():
    rng = np.random.default_rng(0)
    vectors = WordVectors(50, 8, rng)
    adagrad = {"input": Adagrad(vectors.input, 0.1), "output": Adagrad(vectors.output, 0.1)}
    batch = NegativeSampler(np.ones(50, np.int64)).batch(rng.integers(0, 50, (32, 2)), rng)
    before = vectors.loss(batch)
    for _ in range(50):
        for table, (indices, rows) in vectors.gradients(batch).items():
            unique, inverse = np.unique(indices, return_inverse=True)
            summed = np.zeros((len(unique), 8), np.float32)
            np.add.at(summed, inverse, rows)
            adagrad[table].update(unique, summed)
    assert vectors.loss(batch) < before / 2


def test_python_documentation_when_read_has_the_words_the_demo_shows():
    words = set(Corpus.from_text(python_documentation()).words)
    assert {"float", "bytes", "exception", "yield", "import", "list"} <= words


def test_read_text_when_it_starts_with_a_byte_order_mark_leaves_it_out(tmp_path):
    path = tmp_path / "text"
    path.write_bytes("Größe".encode("utf-8-sig"))
    assert read_text(path) == "Größe"


def test_read_text_when_the_limit_cuts_a_character_drops_it(tmp_path):
    path = tmp_path / "text"
    path.write_text("a" + "é" * (MAX_BYTES // 2 + 10), encoding="utf-8")
    assert read_text(path) == "a" + "é" * (MAX_BYTES // 2 - 1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "No such file"),
        (b"", "is empty"),
        (b" \n\t ", "is empty"),
        (b"\x7fELF\0\0spam", "is a binary file"),
        ("spam".encode("utf-16"), "is a binary file"),
        (b"caf\xe9 spam", r"is not UTF-8 text \(byte 3\)"),
        (b"spam \xf0\x9f", r"is not UTF-8 text \(byte 5\)"),
    ],
)
def test_read_text_when_it_is_no_text_says_why(tmp_path, data, message):
    path = tmp_path / "text"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(TextError, match=message):
        read_text(path)


def test_read_text_when_it_is_a_folder_says_so(tmp_path):
    with pytest.raises(TextError, match="Is a directory"):
        read_text(tmp_path)


# The training by several workers


@pytest.fixture(scope="module")
def examples() -> Examples:
    ids = (50 * np.random.default_rng(0).random(3000) ** 2).astype(int)
    return Examples.from_corpus(Corpus.from_text(" ".join(f"word{i}" for i in ids)), seed=0)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if not thread.daemon:
            thread.join(timeout=60)
            assert not thread.is_alive(), thread


def settings(**changes) -> Settings:
    return Settings(**{"workers": 3, "required": 2, "dim": 8, "batch_size": 128, **changes})


@pytest.mark.parametrize("required", [1, 3])
def test_training_when_a_worker_fails_raises_its_error(examples, monkeypatch, required):
    calls = iter(range(1000))
    gradients = WordVectors.gradients

    def fail_at_tenth(self, batch):
        if next(calls) == 10:
            raise ZeroDivisionError("the tenth")
        return gradients(self, batch)

    monkeypatch.setattr(WordVectors, "gradients", fail_at_tenth)
    with pytest.raises(ZeroDivisionError, match="the tenth"):
        Training(examples, settings(required=required)).run(seconds=60)


def test_training_when_the_chief_fails_ends_the_workers(examples):
    def fail(_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Training(examples, settings(straggler=60)).run(on_step=fail)


def test_training_when_its_time_is_over_ends_though_no_step_was_made(examples):
    progress = Training(examples, settings(required=3, straggler=60)).run(seconds=0.1)
    assert (progress.steps, progress.accepted, progress.stale_share) == (0, 0, 0)


def test_training_when_done_has_counted_every_gradient(examples):
    training, seen = Training(examples, settings()), []
    progress = training.run(num_pairs=20 * 128, on_step=lambda now: seen.append(now.pairs))
    assert len(seen) == progress.steps
    assert progress.accepted >= 2 * progress.steps
    assert progress.pairs == 128 * progress.accepted == seen[-1] >= 20 * 128
    assert 0 <= progress.stale_share < 1


def test_training_when_done_has_lowered_the_loss_on_pairs_it_never_saw(examples):
    training = Training(examples, settings())
    before = training.held_out_loss()
    training.run(num_pairs=3 * len(examples.pairs))
    assert training.held_out_loss() < before - 0.1


class InTurn:
    """A group whose workers apply in a given order, round after round."""

    def __init__(self, group: gq.AccumulatorGroup, order: list[int]) -> None:
        self._group = group
        self._order = order
        self._num_applied = 0
        self._changed = threading.Condition()

    def __getattr__(self, name):
        return getattr(self._group, name)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._group.close()

    def _turn(self) -> int:
        return self._order[self._num_applied % len(self._order)]

    def worker(self, index):
        worker = self._group.worker(index)
        apply = worker.apply

        def apply_in_turn(gradients):
            with self._changed:
                assert self._changed.wait_for(lambda: self._turn() == index, timeout=60)
                receipt = apply(gradients)
                self._num_applied += 1
                self._changed.notify_all()
                return receipt

        worker.apply = apply_in_turn
        return worker


def test_training_when_all_are_required_gives_the_same_bits_for_every_order_of_arrival(examples):
    tables = []
    for order in ([0, 1, 2], [2, 1, 0]):
        training = Training(examples, settings(required=3))
        training._group = InTurn(training._group, order)
        training.run(num_pairs=20 * 128)
        tables.append(training.vectors.input)
    np.testing.assert_array_equal(*tables)


def test_training_when_a_worker_is_slow_counts_what_it_sends_too_late(examples):
    progress = Training(examples, settings(straggler=0.2)).run(seconds=1)
    assert progress.steps > progress.stale > 0
