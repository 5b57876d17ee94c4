"""A server with a folder: what comes back after its end, and after a crash at any moment."""

import logging
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import numpy as np
import pytest

import gradquorum as gq
from gradquorum.checkpoint import read_checkpoint
from gradquorum.targets.process import checkpoints
from tests.support import TIMEOUT, GatedMerges, accept, apply, assert_rows, available_engines, wait_until

pytest.importorskip("safetensors")

LATE = 1e6  # seconds: not before this test is over
DUPLICATE = gq.ApplyStatus.DUPLICATE


def sparse(server, name="emb", shape=(10, 1), **options):
    """Make a handle that reaches the server as those of other processes do."""
    return gq.SparseConditionalAccumulator("float32", shape, name, target=server.address, **options)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "kept"


@contextmanager
def serving(folder, every=LATE):
    with gq.Server(checkpoint=folder, checkpoint_every=every) as server:
        yield server


@contextmanager
def after_a_crash_now(folder):
    """A server of what would be in the folder if the server were killed at this moment."""
    copy = copied(folder, "copy")
    try:
        with serving(copy) as server:
            yield server
    finally:
        shutil.rmtree(copy)


def copied(folder, name):
    """Copy what a crash would leave at this moment, but for files half written: the saving thread may rename one now."""
    copy = folder.with_name(name)
    return shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.gradquorum.tmp"))


def files(folder):
    return sorted(path.name for path in folder.iterdir())


# The end of a server


def test_round_comes_back_when_the_first_client_brings_its_spec(folder):
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
        taken = gq.AccumulatorGroup(members, "g", target=server).take(1)
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
            wait_until(lambda: acc.closed or server._ended.is_set(), "a server that closes")
        assert_rows(take.result(), [0], [1.0])
        closing.result()
    with serving(folder) as server:
        again = sparse(server)
        assert (again.global_step, again.num_undelivered, again.num_accumulated()) == (1, 0, 0)


# Crashes


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
    monkeypatch.setattr(checkpoints, "write_checkpoint", lambda path, state: (written.append(path), write(path, state)))
    with serving(folder, every=0) as server:
        acc = sparse(server)
        accept(acc, [0], [1.0])
        count = len(written)
        assert (acc.num_accumulated(), acc.global_step, acc.last_sequence("a")) == (1, 0, -1)
        server.rounds.all()[0].save()
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


# Files


def test_pickled_handle_comes_back_but_a_name_alone_does_not(folder, tmp_path):
    address = str(tmp_path / "server")
    with gq.Server(address, checkpoint=folder) as server:
        acc = sparse(server)
        accept(acc, [0], [1.0])
        pickled = pickle.dumps(acc)
    with gq.Server(address, checkpoint=folder) as server:
        with pytest.raises(gq.InvalidArgumentError, match="the first to come has to bring the spec"):
            gq.attach("emb", server)
        assert pickle.loads(pickled).num_accumulated() == 1
        assert gq.attach("emb", server).num_accumulated() == 1


@pytest.mark.parametrize("change", ["other spec", "truncated", "no checkpoint", "folder", "pipe"])
def test_file_that_does_not_fit_is_an_error_to_that_client_and_stays(folder, change):
    with serving(folder) as server:
        accept(sparse(server), [0], [1.0])
    file = folder / "emb.safetensors"
    if change == "truncated":
        file.write_bytes(file.read_bytes()[:-1])
    elif change == "no checkpoint":
        file.write_bytes(b"")
    elif change == "folder":
        file.unlink()
        file.mkdir()
    elif change == "pipe":
        file.unlink()
        os.mkfifo(file)  # to open it the usual way would wait until somebody writes to it
    before = file.read_bytes() if file.is_file() else None
    with serving(folder) as server:
        shape = (11, 1) if change == "other spec" else (10, 1)
        for _ in range(2):
            with pytest.raises(gq.GradQuorumError, match=r"the checkpoint .*emb\.safetensors") as error:
                sparse(server, shape=shape)
            if change == "other spec":
                assert error.match(r"expected one of .*11.* got one of .*10")
        sparse(server, "another")
    assert (file.read_bytes() if file.is_file() else None) == before


def test_others_are_served_while_a_round_is_restored_which_is_made_once(folder, monkeypatch, run_thread):
    with serving(folder) as server:
        accept(sparse(server), [0], [1.0])
    begun, may_go_on, read = threading.Event(), threading.Event(), []

    def read_slowly(path):
        read.append(path)
        begun.set()
        assert may_go_on.wait(TIMEOUT)
        return read_checkpoint(path)

    monkeypatch.setattr(checkpoints, "read_checkpoint", read_slowly)
    with serving(folder) as server:
        calls = [run_thread(sparse, server)]
        assert begun.wait(TIMEOUT)
        calls += [run_thread(sparse, server) for _ in range(2)]
        accept(sparse(server, "another"), [0], [1.0])
        may_go_on.set()
        assert [call.result().num_accumulated() for call in calls] == [1, 1, 1]
    assert len(read) == 1


def test_server_that_is_closed_while_it_restores_a_round_leaves_its_file_as_it_was(folder, monkeypatch, run_thread):
    with serving(folder) as server:
        accept(sparse(server), [0], [1.0])
    before = (folder / "emb.safetensors").read_bytes()
    begun, may_go_on = threading.Event(), threading.Event()

    def read_slowly(path):
        begun.set()
        assert may_go_on.wait(TIMEOUT)
        return read_checkpoint(path)

    monkeypatch.setattr(checkpoints, "read_checkpoint", read_slowly)
    with serving(folder) as server:
        call = run_thread(server.accumulator, "float32", (10, 1), "emb")
        assert begun.wait(TIMEOUT)
        server.close()
        may_go_on.set()
        assert isinstance(call.error(), gq.ClosedError)
    assert (folder / "emb.safetensors").read_bytes() == before


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc/passwd", "ж\0", "\ud800", "a%2Fb", "x" * 200])
def test_any_name_makes_a_file_in_the_folder(folder, name):
    with serving(folder) as server:
        accept(sparse(server, name), [0], [1.0])
    assert len(files(folder)) == 1
    assert folder.parent.joinpath("kept") == folder
    assert [path.name for path in folder.parent.iterdir()] == ["kept"]
    with serving(folder) as server:
        assert sparse(server, name).num_accumulated() == 1


def test_name_that_makes_no_file_name_is_refused(folder):
    with serving(folder) as server:
        for name in ("x" * 244, "ж" * 41):
            with pytest.raises(gq.InvalidArgumentError, match="file name of at most"):
                sparse(server, name)
        accept(sparse(server, "x" * 243), [0], [1.0])
    assert files(folder) == ["x" * 243 + ".safetensors"]


def test_two_servers_do_not_share_a_folder(folder):
    with serving(folder) as server:
        with pytest.raises(gq.InvalidArgumentError, match="a living one uses"):
            gq.Server(checkpoint=folder)
        accept(sparse(server), [0], [1.0])
    with serving(folder):
        pass


def test_folder_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(gq.InvalidArgumentError, match="checkpoint: expected a directory"):
        gq.Server(tmp_path / "server", checkpoint=tmp_path / "file")
    with pytest.raises(gq.InvalidArgumentError, match="checkpoint: expected a directory"):
        gq.Server(tmp_path / "server", checkpoint="\0")
    for what in (3, "", b"kept"):
        with pytest.raises(gq.InvalidArgumentError, match="checkpoint: expected the path"):
            gq.Server(tmp_path / "server", checkpoint=what)
    for every in (-1, float("nan"), float("inf"), None, "1", True):
        with pytest.raises(gq.InvalidArgumentError, match="checkpoint_every: expected"):
            gq.Server(tmp_path / "server", checkpoint=tmp_path / "kept", checkpoint_every=every)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_half_written_files_of_a_killed_server_are_removed_and_others_stay(folder):
    folder.mkdir()
    for name in (f".{'0a' * 8}.gradquorum.tmp", ".emb.gradquorum.tmp", "notes.txt"):
        (folder / name).write_text("")
    with serving(folder):
        assert files(folder) == [".emb.gradquorum.tmp", "notes.txt"]


@pytest.mark.parametrize("worker", ["\ud800", 10**5000], ids=["surrogate", "5001 digits"])
def test_worker_that_cannot_be_saved_is_refused_before_it_is_in_the_way(folder, worker):
    with serving(folder, every=0) as server:
        acc = sparse(server)
        for call in (acc.worker, acc.last_sequence, lambda name: apply(acc, [0], [1.0], worker=name)):
            with pytest.raises(gq.InvalidArgumentError, match="worker: expected one that JSON can hold"):
                call(worker)
        accept(acc, [0], [1.0], worker=-(2**70))


def fail(*arguments):
    raise OSError(28, "No space left on device")


def test_change_that_cannot_be_saved_is_of_unknown_outcome_and_may_be_sent_again(folder, monkeypatch):
    with serving(folder, every=0) as server:
        acc = sparse(server)
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints, "write_checkpoint", fail)
            for _ in range(2):
                with pytest.raises(gq.UnavailableError, match="No space left") as error:
                    apply(acc, [0], [1.0], worker="a", sequence=0)
                assert not error.value.outcome_known
        assert apply(acc, [0], [1.0], worker="a", sequence=0).status is DUPLICATE
        with after_a_crash_now(folder) as other:
            assert_rows(sparse(other).take_grad(1), [0], [1.0])


def test_round_that_cannot_be_saved_is_not_handed_out(folder, monkeypatch):
    with serving(folder) as server:
        acc = sparse(server)
        accept(acc, [0], [1.0])
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints, "write_checkpoint", fail)
            with pytest.raises(gq.GradQuorumError, match="No space left"):
                acc.take_grad(1)
        assert acc.num_undelivered == 1
        assert_rows(acc.take_grad(1), [0], [1.0])


def test_save_from_time_to_time_that_fails_is_in_the_log_and_tried_again(folder, monkeypatch, caplog):
    with caplog.at_level(logging.ERROR, "gradquorum"), serving(folder, every=0.02) as server:
        acc = sparse(server)
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints, "write_checkpoint", fail)
            accept(acc, [0], [1.0])
            wait_until(lambda: "'emb' could not be saved" in caplog.text, "a line in the log")
        wait_until(lambda: files(folder) == ["emb.safetensors"], "a file")


def test_last_save_that_fails_is_raised_by_close_which_closes_all_the_same(folder, monkeypatch):
    server = gq.Server(checkpoint=folder, checkpoint_every=LATE)
    acc = sparse(server)
    accept(acc, [0], [1.0])
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "write_checkpoint", fail)
        with pytest.raises(gq.GradQuorumError, match=r"'emb' could not be saved.*No space left"):
            server.close()
    assert server.close() == 0
    with pytest.raises((gq.ClosedError, gq.UnavailableError)):
        acc.num_accumulated()
    with serving(folder):  # nobody has the folder any more
        pass


def test_missing_safetensors_is_said_at_once(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(gq.GradQuorumError, match="pip install safetensors"):
        gq.Server(checkpoint=folder)


# The command


def start_command(address, *arguments):
    command = [sys.executable, "-m", "gradquorum", "serve", "--address", str(address), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if "listening" in (line := process.stdout.readline()):
        return process
    return process, line + process.communicate(timeout=TIMEOUT)[0]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_command_keeps_rounds(tmp_path, how):
    address, arguments = tmp_path / "server", ("--checkpoint", str(tmp_path / "kept"), "--every", "0")
    for count in range(2):
        process = start_command(address, *arguments)
        try:
            acc = gq.SparseConditionalAccumulator("float32", (10, 1), "emb", target=address)
            assert acc.last_sequence("a") == count - 1
            accept(acc, [0], [1.0], worker="a", sequence=count)
        finally:
            process.send_signal(how)
            output, _ = process.communicate(timeout=TIMEOUT)
        assert process.returncode == (0 if how == signal.SIGTERM else -signal.SIGKILL), output


def test_command_whose_last_save_fails_says_so_and_ends_with_1(tmp_path):
    process = start_command(tmp_path / "server", "--checkpoint", str(tmp_path / "kept"))
    try:
        acc = gq.SparseConditionalAccumulator("float32", (10, 1), "emb", target=tmp_path / "server")
        accept(acc, [0], [1.0])
        shutil.rmtree(tmp_path / "kept")
    finally:
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 1
    assert "'emb' could not be saved" in output


def test_command_needs_a_folder_to_save_to(tmp_path):
    process, output = start_command(tmp_path / "server", "--every", "1")
    assert process.returncode == 2
    assert "--every needs --checkpoint" in output
