"""A server with a folder: what comes back after a crash at any moment."""

import logging

import pytest

import gradquorum as gq
from gradquorum.targets.process import checkpoints
from tests.process.keeping import after_a_crash_now, copied, files, serving, sparse
from tests.support import TIMEOUT, GatedMerges, accept, apply, assert_rows, available_engines, wait_until

pytest.importorskip("safetensors")

DUPLICATE = gq.ApplyStatus.DUPLICATE


def test_every_change_is_saved_before_it_is_answered(folder):
    with serving(folder, every=0) as server:
        acc = sparse(server, expected_workers=3, max_per_worker=2)
        accept(acc, [3], [1.0], worker=0, sequence=0)
        with after_a_crash_now(folder) as other:
            again = sparse(other, expected_workers=3, max_per_worker=2)
            assert apply(again, [3], [1.0], worker=0, sequence=0).status is DUPLICATE
            assert_rows(again.take_grad(1), [3], [1.0])
        apply(acc, [3], [1.0], worker=1, sequence=9, local_step=-1)  # stale: only its mark changes
        acc.worker(2).leave()
        acc.set_global_step(7)
        with after_a_crash_now(folder) as other:
            again = sparse(other, expected_workers=3, max_per_worker=2)
            assert (again.last_sequence(1), again.global_step, again.num_accumulated()) == (9, 7, 1)
        acc.discard()
        with after_a_crash_now(folder) as other:
            assert sparse(other, expected_workers=3, max_per_worker=2).num_accumulated() == 0


def test_what_was_accepted_since_the_last_save_is_sent_again_and_nothing_else(folder):
    with serving(folder) as server:
        acc = sparse(server)
        for sequence in range(3):
            accept(acc, [sequence], [1.0], worker="a", sequence=sequence)
            if sequence == 1:
                acc.publish(0)  # which saves
        with after_a_crash_now(folder) as other:
            again = sparse(other)
            assert again.last_sequence("a") == 1
            accept(again, [2], [1.0], worker="a", sequence=2)
            assert_rows(again.take_grad(3), [0, 1, 2], [1.0] * 3)


@pytest.mark.parametrize("kind", ["take_grad", "submit_take", "take_grad_async"])
def test_round_that_was_delivered_never_comes_again(folder, kind):
    import asyncio

    takes = {
        "take_grad": lambda acc: acc.take_grad(2),
        "submit_take": lambda acc: acc.submit_take(2).result(TIMEOUT),
        "take_grad_async": lambda acc: asyncio.run(acc.take_grad_async(2)),
    }
    with serving(folder) as server:
        acc = sparse(server)
        for worker in range(2):
            accept(acc, [0], [1.0], worker=worker, sequence=0)
        takes[kind](acc)

        def is_saved():
            with after_a_crash_now(folder) as other:
                again = sparse(other)
                assert (again.global_step, again.num_accumulated(), again.last_sequence(1)) == (1, 0, 0)
                return again.num_undelivered == 0

        if kind == "take_grad_async":
            wait_until(is_saved, "a delivered round")  # a coroutine does not wait for the server to say so
        assert is_saved()


def test_published_steps_and_discarded_gradients_are_saved_at_once(folder):
    with serving(folder) as server:
        acc = sparse(server)
        acc.publish(3)
        accept(acc, [0], [1.0])
        acc.publish(4)
        with after_a_crash_now(folder) as other:
            assert (sparse(other).published_step, sparse(other).num_accumulated()) == (4, 1)
        acc.discard()
        with after_a_crash_now(folder) as other:
            assert sparse(other).num_accumulated() == 0
        acc.set_global_step(7)
        with after_a_crash_now(folder) as other:
            assert sparse(other).global_step == 7


def test_round_on_its_way_comes_again_whole_and_alone_with_its_step(folder, run_thread, caplog):
    engine = available_engines()[-1]
    with serving(folder) as server:
        acc = sparse(server)
        acc.set_global_step(6)
        accept(acc, [0], [1.0], worker="a", sequence=0)
        with GatedMerges(engine) as merges:
            take = run_thread(acc.take_grad, 1)
            assert merges.begun.wait(TIMEOUT)
            then = copied(folder, "then")
        assert take.result().step == 6
    with serving(then) as server, caplog.at_level(logging.WARNING, "gradquorum"):
        again = sparse(server)
        assert "may have arrived" in caplog.text
        accept(again, [0], [5.0], worker="b", sequence=0)
        assert apply(again, [0], [1.0], worker="a", sequence=0).status is DUPLICATE
        taken = again.take_grad(1)
        assert (taken.step, taken.workers, again.global_step) == (6, ("a",), 7)
        assert_rows(taken, [0], [1.0])


def test_round_that_is_given_back_after_it_had_arrived_is_saved_as_such(folder, monkeypatch):
    from gradquorum.targets.process.client import Client

    with serving(folder) as server:
        acc = sparse(server)
        accept(acc, [0], [1.0])

        def interrupted(self, connection):
            raise KeyboardInterrupt  # when the server has heard that the round arrived

        with monkeypatch.context() as patch:
            patch.setattr(Client, "check_in", interrupted)
            with pytest.raises(KeyboardInterrupt):
                acc.take_grad(1)
        wait_until(lambda: acc.num_undelivered == 1, "a round that was given back")
        with after_a_crash_now(folder) as other:
            assert sparse(other).num_undelivered == 1


def test_changed_round_is_saved_from_time_to_time(folder):
    with serving(folder, every=0.02) as server:
        acc = sparse(server)
        for sequence in range(2):
            accept(acc, [0], [1.0], worker="a", sequence=sequence)

            def is_saved(want=sequence):
                with after_a_crash_now(folder) as other:
                    return sparse(other).last_sequence("a") == want

            wait_until(lambda: files(folder) == ["emb.safetensors"] and is_saved(), "a saved round")


def test_unchanged_round_is_not_written_again(folder, monkeypatch):
    written = []
    write = checkpoints.write_checkpoint
    monkeypatch.setattr(
        checkpoints, "write_checkpoint", lambda path, state, spec: (written.append(path), write(path, state))
    )
    with serving(folder, every=0) as server:
        acc = sparse(server)
        accept(acc, [0], [1.0])
        count = len(written)
        assert (acc.num_accumulated(), acc.global_step, acc.last_sequence("a")) == (1, 0, -1)
        server._service.rounds.all()[0].save()
        assert len(written) == count


def test_workers_have_to_join_anew_and_those_that_left_are_gone(folder):
    options = {"expected_workers": 2, "max_per_worker": 1}
    with serving(folder) as server:
        acc = sparse(server, **options)
        accept(acc, [0], [1.0], worker="live", sequence=0)
        acc.worker("gone").leave()
        acc.publish(0)
        with after_a_crash_now(folder) as other:
            again = sparse(other, **options)
            assert again.num_workers == 0
            with pytest.raises(gq.DeadlineExceededError):  # the live one may come back and bring another's
                again.take_grad(2, timeout=0)
            again.worker("live")
            with pytest.raises(gq.UnavailableError, match=r"1 workers live, 2 gradients needed.*left: 'gone'"):
                again.take_grad(2, timeout=0)
