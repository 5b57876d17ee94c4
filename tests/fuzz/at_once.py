"""What other threads do meanwhile: they write to the arrays, empty the lists, call the same, drop what is used."""

import gc
import threading

import numpy as np

import gradquorum as gq
from gradquorum import _native
from tests.fuzz.boundary import Wrong, check
from tests.fuzz.hostile import ids, numbers, one_in, pick, same_bits
from tests.fuzz.raw import Made

SECONDS = 60.0


class Meddler:
    """A thread that does something over and over while the block runs."""

    def __init__(self, action):
        self._action = action
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self):
        while not self._stop.is_set():
            self._action()

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exception):
        self._stop.set()
        self._thread.join(SECONDS)
        check(not self._thread.is_alive(), "a thread hangs")


def in_threads(fuzz, work, count):
    """Run `work(number)` in threads; raise what one of them raised."""
    errors = []

    def run(number):
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    check(not any(thread.is_alive() for thread in threads), "a thread hangs")
    if errors:
        raise errors[0]


def _ascending(indices, allowed):
    check(bool((indices[1:] > indices[:-1]).all()), "ids", indices)
    strange = indices[~np.isin(indices, allowed)]
    check(not len(strange), "ids that nobody gave", strange)


def mutated(fuzz, rng):
    """Ids, values and lists change while they are read."""
    n = int(rng.integers(2, 3000))
    forms = np.arange(n), rng.integers(0, 2**62, n), rng.integers(0, 5, n), -np.arange(n)
    allowed = np.unique(np.concatenate(forms))
    indices, values = np.arange(n), np.ones((n, int(rng.integers(1, 20))), np.float32)
    turn = [0]

    def write():
        turn[0] += 1
        np.add(forms[turn[0] % 4], 0, out=indices)  # id by id; a plain copy may go byte by byte
        values.fill(turn[0] % 2)

    native = _native.SparseReducer("float32", "float32", "SUM", int(rng.integers(1, 4)))
    blocks = [native.block(np.arange(n), values.copy(), 1.0, False, False)]

    def empty():
        write()
        blocks[1:] = [blocks[0]] * (turn[0] % 5)

    with Meddler(empty):
        for _ in range(12):
            block, error = fuzz.inside(native.block, indices, values, 1.0, one_in(rng, 2), one_in(rng, 2))
            check(error is None, "block", error)
            merged, error = fuzz.inside(native.merge, [block, block], values.shape[1:], 2)
            check(error is None and bool((merged[2] == 2).all()), "merge")
            _ascending(merged[0], allowed)
            merged, error = fuzz.inside(native.merge, blocks, values.shape[1:], 2)
            check(error is None, "merge", error)
            _ascending(merged[0], forms[0])
            fuzz.inside(native.compact, blocks)
            fuzz.inside(native.distinct_bytes, blocks)
        with gq.SparseConditionalAccumulator("float32", (2**62, *values.shape[1:]), engine="native") as acc:
            for _ in range(6):  # negative ids are refused, if they are seen
                fuzz.call(acc.apply_grad, indices, values, local_step=None, copy=one_in(rng, 2))
            taken, _ = fuzz.call(acc.take_grad, 1, timeout=0)
    if taken is not None:  # not always ids that were given: NumPy made the copy, and may copy byte by byte
        check(bool((taken.indices[1:] > taken.indices[:-1]).all()), "ids do not ascend")
        check(bool((taken.indices >= 0).all()), "a negative id came through the checks")


def together(fuzz, rng):
    """Several threads merge, compact and drop the same blocks; all get the same bits."""
    made, width = Made(rng, "sparse"), int(rng.integers(1, 9))
    n = pick(rng, [10, 300, 9000])
    sources = []
    for _ in range(4):
        indices = ids(rng, n)
        sources.append((indices, numbers(rng, made.dtype, (len(indices), width)), made.weight(rng)))
    twins = [made.reference.block(i.copy(), v, weight=w) for i, v, w in sources]
    expected = made.reference.merge(twins, (width,), len(twins))
    blocks = [made.native.block(i, made.crossing(v), w, one_in(rng, 2), False) for i, v, w in sources]

    def work(number):
        log = list(blocks)
        for _ in range(3):
            merged, error = fuzz.inside(made.native.merge, log, (width,), len(sources))
            if error is not None:
                raise Wrong("merge") from error
            for got, want in zip((merged[0], made.back(merged[1]), merged[2]), expected, strict=True):
                check(same_bits(got, want), "merge: got, want", got, want)
            log[: 1 + number % 3] = [made.native.compact(log[: 1 + number % 3])]
            fuzz.inside(made.native.distinct_bytes, log)
            fuzz.inside(made.native.block, *([sources[0][0], made.crossing(sources[0][1])]), 1.0, False, True)
            _native.trim_memory()

    in_threads(fuzz, work, int(rng.integers(2, 5)))
    _accumulated_together(fuzz, rng)


def _accumulated_together(fuzz, rng):
    """Threads apply, take and close: every accepted gradient is delivered or discarded, once."""
    acc = gq.SparseConditionalAccumulator("float64", (50, 3), reduction_type="SUM", engine="native")
    accepted, delivered, late = [], [], []
    closes = one_in(rng, 2)

    def work(number):
        indices, rows = np.arange(number, 50, 7), np.ones((len(range(number, 50, 7)), 3))
        for i in range(8):
            receipt, _ = fuzz.call(acc.apply_grad, indices, rows, local_step=None, copy=bool(i % 2))
            if receipt:
                accepted.append(len(indices))
            if i % 3 == 2:
                taken, _ = fuzz.call(acc.take_grad, 1, timeout=0)
                if taken is not None:
                    delivered.append((taken.num_gradients, taken.values[:, 0].sum()))
            if closes and number == 0 and i == 5:
                late.append(acc.close())

    in_threads(fuzz, work, 4)
    while not acc.closed and acc.num_accumulated():
        taken = acc.take_grad(1, timeout=0)
        delivered.append((taken.num_gradients, taken.values[:, 0].sum()))
    late.append(acc.close())
    gradients = sum(count for count, _ in delivered) + sum(late)
    check(gradients == len(accepted), "accepted, delivered or discarded", len(accepted), gradients)
    if not sum(late):
        check(sum(total for _, total in delivered) == sum(accepted), "the totals differ")


def dropped(fuzz, rng):
    """Lent arrays outlive their owners' interest in them; results outlive everything."""
    made, width = Made(rng, "sparse"), int(rng.integers(1, 40))
    blocks, twins, results = [], [], []
    for _ in range(int(rng.integers(1, 6))):
        indices = np.unique(ids(rng, int(rng.integers(1, 200))))
        values = numbers(rng, made.dtype, (len(indices), width))
        weight = made.weight(rng)
        twins.append(made.reference.block(indices.copy(), values.copy(), weight=weight))
        block, error = fuzz.inside(made.native.block, indices, made.crossing(values), weight, True, False)
        check(error is None and block.lent, "lent block", error)
        try:
            values.resize((len(values) + 1, width))  # NumPy must see that somebody reads it
        except ValueError:
            pass
        else:
            raise Wrong("a lent array could be resized")
        indices.fill(-1)
        blocks.append(block)
        del values, indices, block
    gc.collect()
    garbage = [np.full((100, width), 0xEE, np.uint8) for _ in range(20)]
    expected = made.reference.merge(twins, (width,), len(twins))
    readers = blocks[:]
    del blocks

    def drop():
        if readers and one_in(rng, 3):
            results.append(np.empty(1000))

    with Meddler(drop):
        merged, error = fuzz.inside(made.native.merge, readers, (width,), len(twins))
    check(error is None, "merge", error)
    held = made.native.compact(readers)
    readers.clear()
    del garbage
    gc.collect()
    for got, want in zip((merged[0], made.back(merged[1]), merged[2]), expected, strict=True):
        check(same_bits(got, want), "merge: got, want", got, want)
    again, _ = fuzz.inside(made.native.merge, [held], (width,), len(twins))
    del held, made
    check(same_bits(again[0], expected[0]), "ids after a compaction")
    threading.Thread(target=merged.__len__).start()  # the last reference may go in another thread
