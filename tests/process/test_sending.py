"""In which order a gradient goes to the server, and that its sum has the same bits whatever that order is."""

import numpy as np
import pytest

import gradquorum as gq
from gradquorum.targets.process import messages
from gradquorum.targets.process.parts import arrays_of
from gradquorum.targets.process.sending import Sender

DIM = 64
SMALL, LARGE = 16, 1024
"""Rows of gradients of 4 KiB and more, below and above what the server lends."""
RNG = np.random.default_rng(5)


@pytest.fixture
def sent(monkeypatch):
    """The ids of every gradient, as they were written for the server."""
    ids = []

    def send(self, parts, num_bytes, write_to, terms):
        memory = np.zeros(num_bytes, np.uint8)
        write_to(memory)
        arrays = arrays_of(memory, [gq.SparseSpec("float32", (None, DIM))] * len(parts), parts)
        ids.extend(array for array in arrays if array.dtype == np.int64)
        return original(self, parts, num_bytes, write_to, terms)

    original = Sender._send
    monkeypatch.setattr(Sender, "_send", send)
    return ids


def ids_of(num_rows, repeated):
    """Return ids that do not ascend."""
    ids = RNG.choice(10_000, num_rows, replace=False)
    ids[0], ids[-1] = 10_001, 10_000
    if repeated:
        ids[3:7] = ids[-1]
    return ids


def values_of(num_rows):
    """Return values whose sum depends on the order of addition."""
    return (RNG.standard_normal((num_rows, DIM)) * 10.0 ** RNG.integers(-6, 6, (num_rows, 1))).astype(np.float32)


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize(
    ("num_rows", "repeated", "ordered"),
    [(SMALL, False, False), (SMALL, True, True), (LARGE, False, True), (LARGE, True, True)],
)
def test_worker_orders_what_is_lent_or_has_repeats(engine, server, sent, num_rows, repeated, ordered, plain):
    ids, rows = ids_of(num_rows, repeated), values_of(num_rows)
    with gq.SparseConditionalAccumulator("float32", (None, DIM), engine=engine, target=server.address) as acc:
        assert acc.apply_grad(ids, rows if plain else rows.tolist())
    ordered = ordered or (plain and engine == "native")  # which checks it as a block, and that is in order
    np.testing.assert_array_equal(sent, [np.unique(ids) if ordered else ids])


@pytest.mark.parametrize("num_rows", [SMALL, LARGE])
@pytest.mark.parametrize("repeated", [False, True])
@pytest.mark.parametrize("options", [{}, {"reduction_type": "MEAN_BY_WEIGHT"}, {"accumulate_dtype": "float64"}])
def test_sum_has_the_bits_of_the_local_one(engine, server, num_rows, repeated, options):
    gradients = [(ids_of(num_rows, repeated), values_of(num_rows)) for _ in range(3)]
    weight = 0.3 if options.get("reduction_type") else 1.0
    results = []
    for target in ("local", server.address):
        with gq.SparseConditionalAccumulator("float32", (None, DIM), engine=engine, target=target, **options) as acc:
            for ids, rows in gradients:
                assert acc.apply_grad(ids, rows, weight=weight)
            results.append(acc.take_grad(3))
    local, remote = results
    np.testing.assert_array_equal(remote.indices, local.indices)
    np.testing.assert_array_equal(remote.values.view(np.uint32), local.values.view(np.uint32))


def test_group_is_lent_or_copied_as_a_whole(server, sent):
    ids = ids_of(LARGE // 4, repeated=False)
    specs = {name: gq.SparseSpec("float32", (None, DIM)) for name in ("a", "b")}
    gradient = gq.IndexedSlices(values_of(len(ids)), ids)
    with gq.AccumulatorGroup(specs, target=server.address) as group:
        assert group.apply({"a": gradient, "b": gradient})
        assert group.apply({"a": gradient})
    one, other, alone = (found for found in sent if len(found))
    np.testing.assert_array_equal([one, other], [np.sort(ids)] * 2)
    np.testing.assert_array_equal(alone, ids)


def test_small_gradients_written_to_a_large_block_keep_to_the_budget_of_the_server():
    most = 1 << 20
    rows, ids = np.ones((LARGE, DIM), np.float32), ids_of(LARGE // 4, repeated=False)
    with gq.Server(max_bytes=most) as server:
        acc = server.accumulator("float32", (None, DIM), "small")
        with gq.attach("small", server.address) as worker:
            assert worker.apply_grad(np.arange(LARGE), rows)
            acc.take_grad(1)
            assert worker.apply_grad([0], rows[:1], local_step=None)  # hears that its block is free
            with pytest.raises(gq.ResourceExhaustedError):
                for _ in range(100):
                    worker.apply_grad(ids, rows[: len(ids)], local_step=None)
            assert server._service.held_bytes <= most + rows.nbytes  # the block that is read counts once only


@pytest.mark.parametrize("num_rows", [SMALL + 1, LARGE])
@pytest.mark.parametrize("options", [{}, {"on_full": "block", "max_bytes": 1 << 24}])
def test_gradients_that_go_through_one_block_do_not_change_each_other(engine, num_rows, options):
    ids = np.arange(num_rows)
    specs = {"table": gq.SparseSpec("float32", (None, DIM)), "bias": gq.DenseSpec("float32", (num_rows, DIM))}
    with (
        gq.Server() as server,  # of its own: there are no larger blocks from before
        gq.ConditionalAccumulator("float32", (num_rows, DIM), engine=engine, target=server.address, **options) as dense,
        gq.SparseConditionalAccumulator("float32", (None, DIM), engine=engine, target=server.address, **options) as acc,
        gq.AccumulatorGroup(specs, engine=engine, target=server.address, **options) as group,
    ):
        for number in (1.0, 2.0, 6.0):
            values = np.full((num_rows, DIM), number, np.float32)
            assert dense.apply_grad(values) and acc.apply_grad(ids, values)
            assert group.apply({"table": gq.IndexedSlices(values, ids), "bias": values})
        taken = group.take(3)
        for mean in (dense.take_grad(3), acc.take_grad(3).values, taken["table"].values, taken["bias"]):
            np.testing.assert_array_equal(mean, np.full((num_rows, DIM), 3.0, np.float32))


@pytest.mark.parametrize("num_rows", [1, LARGE])
@pytest.mark.parametrize("num_bytes", [messages.MAX_TEXT_BYTES, messages.MAX_MESSAGE_BYTES])
def test_worker_whose_name_no_server_reads_is_told_so_and_nothing_has_changed(server, num_rows, num_bytes):
    ids, rows = np.arange(num_rows), np.ones((num_rows, DIM), np.float32)
    with gq.SparseConditionalAccumulator("float32", (None, DIM), target=server.address) as acc:
        assert acc.apply_grad(ids, rows, worker=1)
        for call in (
            lambda worker: acc.apply_grad(ids, rows, worker=worker),
            lambda worker: acc.last_sequence(worker),
            lambda worker: acc.worker(worker),
        ):
            with pytest.raises(gq.InvalidArgumentError, match=r"workers of at most .* bytes.*shorter"):
                call("w" * num_bytes)
        longest = "w" * (messages.MAX_TEXT_BYTES - 1)  # a byte says that it is a text
        assert acc.apply_grad(ids, rows, worker=longest)
        assert acc.take_grad(2).workers == (1, longest)


@pytest.mark.parametrize("num_members", [messages.MAX_MEMBERS, messages.MAX_MEMBERS + 1])
def test_group_of_more_members_than_a_server_reads_is_refused_and_the_session_goes_on(server, num_members):
    specs = {f"{number}": gq.DenseSpec("float32", ()) for number in range(num_members)}
    with gq.SparseConditionalAccumulator("float32", target=server.address) as acc:
        if num_members > messages.MAX_MEMBERS:
            with pytest.raises(gq.InvalidArgumentError, match=r"at most 4096 members.*several groups"):
                gq.AccumulatorGroup(specs, "many", target=server.address)
        else:
            with gq.AccumulatorGroup(specs, "many", target=server.address) as group:
                assert group.apply(dict.fromkeys(specs, 1.0))
                assert len(group.take(1)) == num_members
        assert acc.num_accumulated() == 0


def test_round_whose_name_no_server_reads_is_refused_and_the_session_goes_on(server):
    with gq.SparseConditionalAccumulator("float32", target=server.address) as acc:
        with pytest.raises(gq.InvalidArgumentError, match="expected names and workers of at most 262144 bytes"):
            gq.attach("n" * (messages.MAX_TEXT_BYTES + 1), server.address)
        assert acc.num_accumulated() == 0
