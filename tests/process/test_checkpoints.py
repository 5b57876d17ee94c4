"""A server with a folder: what comes back after its end."""

import logging

import numpy as np
import pytest

import gradquorum as gq
from tests.process.keeping import files, serving, sparse
from tests.support import TIMEOUT, GatedMerges, accept, apply, assert_rows, available_engines, wait_until

pytest.importorskip("safetensors")

DUPLICATE = gq.ApplyStatus.DUPLICATE


def test_rounds_are_restored_when_the_server_starts(folder):
    with serving(folder) as server:
        accept(sparse(server), [2], [1.0])
        accept(sparse(server, "other"), [2], [1.0])
    with serving(folder) as server:
        assert [hosted.round.num_accumulated(hosted.keeper) for hosted in server._service.rounds.all()] == [1, 1]
        assert_rows(gq.attach("emb", server.address).take_grad(1), [2], [1.0])  # nobody brings a spec


OPTIONS = [
    {"order": "worker", "num_threads": 1},
    {"compact": False, "accumulate_dtype": "float64", "on_nonfinite": "skip"},
    {"expected_workers": 3, "max_per_worker": 2, "max_bytes": 2**63 - 1, "on_full": "block"},
    {"staleness": gq.Window(2), "engine": "reference"},
    {"staleness": gq.Weighted("exponential", decay=0.3), "reduction_type": "SUM"},
    {"staleness": gq.Weighted("inverse", max_lag=5), "reduction_type": "MEAN_BY_WEIGHT"},
    {"staleness": gq.Defer()},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", [(10, 1), (None, 1), None])
def test_restored_round_has_its_spec_with_all_options(folder, options, shape):
    with serving(folder) as server:
        accept(sparse(server, shape=shape, **options), [2], [[1.0]], worker=0)
        (before,) = server._service.rounds.all()
    with serving(folder) as server:
        (restored,) = server._service.rounds.all()
        assert restored.spec == before.spec
        assert restored.host.engine_name == before.host.engine_name
        assert sparse(server, shape=shape, **options).num_accumulated() == 1


def test_round_that_calls_a_function_comes_back_when_that_function_is_brought(folder, caplog):
    def half(lag):
        return 0.5

    def made(server):
        return server.accumulator("float32", (10, 1), "emb", staleness=gq.Weighted(half))

    with serving(folder) as server:
        accept(made(server), [2], [1.0])
    with caplog.at_level(logging.ERROR, "gradquorum"), serving(folder) as server:
        assert "'emb' is not restored" in caplog.text
        with pytest.raises(
            gq.InvalidArgumentError, match=r"emb\.safetensors does not fit.*Come with its spec.*not in it"
        ):
            gq.attach("emb", server)
        assert made(server).num_accumulated() == 1
        assert gq.attach("emb", server).num_accumulated() == 1


def test_round_comes_back_to_a_client_with_its_spec(folder):
    with serving(folder) as server:
        acc = sparse(server, staleness=gq.Defer())
        acc.set_global_step(4)
        acc.publish(3)
        accept(acc, [2], [1.0], worker="a", sequence=5)
        apply(acc, [2], [7.0], local_step=3, worker="b", sequence=0)
        assert server.close() == 0  # nothing is discarded
    assert files(folder) == ["emb.safetensors"]
    with serving(folder) as server:
        acc = sparse(server, staleness=gq.Defer())
        assert (acc.global_step, acc.published_step, acc.num_accumulated(), acc.num_deferred) == (4, 3, 1, 1)
        assert acc.last_sequence("a") == 5
        assert apply(acc, [2], [1.0], worker="a", sequence=5).status is DUPLICATE
        assert_rows(acc.take_grad(1), [2], [1.0])
        assert_rows(acc.take_grad(1), [2], [7.0])


def test_round_with_the_largest_lag_comes_back(folder):
    with serving(folder) as server:
        acc = sparse(server, staleness=gq.Weighted())
        acc.set_global_step(2**63 - 1)
        assert apply(acc, [0], [1.0], local_step=-(2**63), worker="a", sequence=0).lag == 2**64 - 1
    with serving(folder) as server:
        assert sparse(server, staleness=gq.Weighted()).num_accumulated() == 1


def test_group_comes_back(folder):
    members = {"rows": gq.SparseSpec("float32", (5, 2)), "bias": gq.DenseSpec("float64", (2,))}
    with serving(folder) as server:
        gq.AccumulatorGroup(members, "g", target=server.address).apply({"rows": ([1], [[1.0, 2.0]])}, None)
    with serving(folder) as server:
        taken = gq.attach("g", server).take(1)
        np.testing.assert_array_equal(taken["rows"].values, [[1.0, 2.0]])


def test_round_outlives_its_handles_until_it_is_closed_for_all(folder):
    with serving(folder) as server:
        acc = sparse(server)
        accept(acc, [0], [1.0])
        assert acc.close() == 0
        again = sparse(server)
        assert again.num_accumulated() == 1
        again.publish(0)
        assert files(folder) == ["emb.safetensors"]
        assert again.close(for_all=True) == 1
        assert files(folder) == []
        assert sparse(server).num_accumulated() == 0
    with serving(folder) as server:
        assert sparse(server).num_accumulated() == 0


def test_round_without_a_name_is_not_kept(folder):
    with serving(folder) as server:
        acc = sparse(server, None)
        accept(acc, [0], [1.0])
        acc.publish(0)
        assert server.close() == 1
    assert files(folder) == []


def test_take_that_waits_while_the_server_ends_is_cancelled_and_nothing_is_lost(folder):
    with serving(folder) as server:
        acc = sparse(server)
        accept(acc, [0], [1.0])
        waiting = acc.submit_take(2)
        server.close()
        with pytest.raises(gq.CancelledError):
            waiting.result(TIMEOUT)
    with serving(folder) as server:
        assert_rows(sparse(server).take_grad(1), [0], [1.0])


@pytest.mark.parametrize("here", ["of the server", "over the socket"])
def test_round_that_arrives_while_the_server_ends_does_not_come_again(folder, run_thread, here):
    engine = available_engines()[-1]
    with serving(folder) as server:
        acc = sparse(server) if "socket" in here else server.accumulator("float32", (10, 1), "emb")
        accept(acc, [0], [1.0])
        with GatedMerges(engine) as merges:
            take = run_thread(acc.take_grad, 1)
            assert merges.begun.wait(TIMEOUT)
            closing = run_thread(server.close)
            wait_until(lambda: acc.closed or server._service._ended.is_set(), "a server that closes")
        assert_rows(take.result(), [0], [1.0])
        closing.result()
    with serving(folder) as server:
        again = sparse(server)
        assert (again.global_step, again.num_undelivered, again.num_accumulated()) == (1, 0, 0)
