"""The folder of a server and its files: those of others, those that cannot be used, those that cannot be written."""

import logging
import os
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest

import gradquorum as gq
from gradquorum.checkpoint import read_checkpoint, read_spec
from gradquorum.targets.process import checkpoints
from gradquorum.targets.process.hosted import HostedRound
from tests.process.keeping import LATE, after_a_crash_now, files, serving, sparse
from tests.support import STRICT_PYTHON, TIMEOUT, accept, apply, assert_rows, wait_until

save_file = pytest.importorskip("safetensors.numpy").save_file

DUPLICATE = gq.ApplyStatus.DUPLICATE


def test_pickled_handle_comes_back(folder, tmp_path):
    address = str(tmp_path / "server")
    with gq.Server(address, checkpoint=folder) as server:
        acc = sparse(server)
        accept(acc, [0], [1.0])
        pickled = pickle.dumps(acc)
    with gq.Server(address, checkpoint=folder) as server:
        assert pickle.loads(pickled).num_accumulated() == 1
        assert gq.attach("emb", server).num_accumulated() == 1


@pytest.mark.parametrize("change", ["truncated", "no checkpoint", "folder", "pipe", "other's"])
def test_file_that_cannot_be_used_is_an_error_to_who_asks_for_it_and_stays(folder, change, caplog):
    with serving(folder) as server:
        accept(sparse(server), [0], [1.0])
    file = folder / "emb.safetensors"
    if change == "truncated":
        file.write_bytes(file.read_bytes()[:-1])
    elif change == "no checkpoint":
        file.write_bytes(b"")
    elif change == "other's":
        save_file({"w": np.ones(3)}, file)
    else:
        file.unlink()
        file.mkdir() if change == "folder" else os.mkfifo(file)  # to open a pipe would wait until somebody writes to it
    before = file.read_bytes() if file.is_file() else None
    with caplog.at_level(logging.ERROR, "gradquorum"), serving(folder) as server:
        assert "'emb' is not restored: the checkpoint" in caplog.text
        for come in (sparse, sparse, lambda server: gq.attach("emb", server.address)):
            with pytest.raises(gq.GradQuorumError, match=r"the checkpoint .*emb\.safetensors"):
                come(server)
        sparse(server, "another")
    assert (file.read_bytes() if file.is_file() else None) == before


def test_file_that_was_unusable_is_used_when_it_is_whole_again(folder):
    with serving(folder) as server:
        accept(sparse(server), [0], [1.0])
    file = folder / "emb.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with serving(folder) as server:
        with pytest.raises(gq.InvalidArgumentError, match="does not fit"):
            gq.attach("emb", server)
        file.write_bytes(whole)
        assert gq.attach("emb", server).num_accumulated() == 1


HUGE = '["", [], {"max_bytes": 1' + "0" * 5000 + "}]"


@pytest.mark.parametrize("spec", ["", "{}", "[]", "[" * 100_000, HUGE, '["", [], {}]', '["", [], {"order": "random"}]'])
def test_spec_of_a_file_that_can_be_of_no_round_is_refused(folder, spec):
    with serving(folder) as server:
        accept(sparse(server), [0], [1.0])
    file = folder / "emb.safetensors"
    checkpoints.write_checkpoint(file, read_checkpoint(file), spec=spec)
    with serving(folder) as server:
        with pytest.raises(gq.InvalidArgumentError, match=r"emb\.safetensors does not fit"):
            gq.attach("emb", server)
        assert sparse(server).num_accumulated() == 1  # the state is whole


def test_round_whose_engine_is_not_here_goes_on_with_the_default_one(folder):
    with serving(folder) as server:
        accept(sparse(server, engine="reference"), [0], [1.0])
    file = folder / "emb.safetensors"
    spec = read_spec(file).replace('"reference"', '"of another machine"')
    checkpoints.write_checkpoint(file, read_checkpoint(file), spec=spec)
    with serving(folder) as server:
        acc = gq.attach("emb", server.address)
        assert acc.engine == gq.engine_name
        assert_rows(acc.take_grad(1), [0], [1.0])


def test_forked_child_of_a_server_that_was_being_made_does_not_hold_the_folder(folder):
    # Forking beside threads is what DeprecationWarning is about: it is on purpose here.
    command = [*STRICT_PYTHON, "-W", "ignore::DeprecationWarning", "-c", FORK, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("again\n", "")


def test_folder_is_free_when_its_server_is_closed_although_a_child_has_not_closed_the_lock_yet(folder):
    kept = checkpoints.Checkpoints(folder)
    of_child = os.dup(kept._lock)
    with pytest.raises(gq.InvalidArgumentError, match="a living one uses"):
        checkpoints.Checkpoints(folder)
    kept.close()
    checkpoints.Checkpoints(folder).close()
    os.close(of_child)


FORK = """
import os, sys
import gradquorum as gq
from gradquorum.targets.process.hosted import Rounds
restore, ends = Rounds.restore_all, os.pipe()
def forking(rounds):
    global child
    Rounds.restore_all = restore
    child = os.fork()
    if child == 0:
        os.close(ends[1])
        os.read(ends[0], 1)
        os._exit(0)
    restore(rounds)
Rounds.restore_all = forking
gq.Server(checkpoint=sys.argv[1]).close()
gq.Server(checkpoint=sys.argv[1]).close()  # while the child lives
os.close(ends[1])
assert os.waitpid(child, 0)[1] == 0
print("again")
"""


def test_files_of_others_in_the_folder_are_left_alone(folder):
    folder.mkdir()
    names = ["model.bin", "%ff.safetensors", "a%2fb.safetensors", "ж" * 41 + ".safetensors", ".safetensors.bak"]
    for name in names:
        (folder / name).write_text("")
    with serving(folder) as server:
        accept(sparse(server), [0], [1.0])
    assert files(folder) == sorted([*names, "emb.safetensors"])


def test_client_with_another_spec_is_told_how_to_begin_anew(folder):
    with serving(folder) as server:
        accept(sparse(server), [0], [1.0])
    with serving(folder) as server:
        with pytest.raises(gq.InvalidArgumentError, match=r"expected the spec .*10, 1.* got .*11, 1.*begin anew"):
            sparse(server, shape=(11, 1))
        assert gq.attach("emb", server).close(for_all=True) == 1
        assert sparse(server, shape=(11, 1)).num_accumulated() == 0


def test_closed_server_leaves_the_file_of_a_round_that_nobody_asked_for(folder):
    with serving(folder) as server:
        accept(sparse(server), [0], [1.0])
    before = (folder / "emb.safetensors").read_bytes()
    with serving(folder) as server:
        assert server.close() == 0
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


def fail(*arguments, **options):
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


def test_state_of_a_round_that_cannot_be_saved_leaves_no_descriptor(folder, monkeypatch):
    with serving(folder, every=0) as server:
        acc = sparse(server)
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints, "write_checkpoint", fail)
            with pytest.raises(gq.UnavailableError):
                accept(acc, [0], [1.0])
            before = len(os.listdir("/proc/self/fd"))
            for _ in range(5):
                with pytest.raises(gq.UnavailableError, match="No space left"):
                    acc.state_dict()
            assert len(os.listdir("/proc/self/fd")) == before


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


def test_round_whose_file_cannot_be_removed_stays_open_and_kept(folder, monkeypatch):
    with serving(folder, every=0) as server:
        remote = sparse(server)
        for acc in (remote, server.accumulator("float32", (10, 1), "emb")):
            accept(remote, [0], [1.0])
            with monkeypatch.context() as patch:
                patch.setattr(checkpoints, "sync_folder", fail)  # the file is gone by then
                with pytest.raises(gq.GradQuorumError, match="cannot be removed, and so its round is not closed"):
                    acc.close(for_all=True)
            assert not acc.closed
            accept(remote, [0], [1.0])
            assert files(folder) == ["emb.safetensors"]
        assert acc.close(for_all=True) == 4
    assert files(folder) == []


def test_save_from_time_to_time_that_fails_is_in_the_log_and_tried_again(folder, monkeypatch, caplog):
    with caplog.at_level(logging.ERROR, "gradquorum"), serving(folder, every=0.02) as server:
        acc = sparse(server)
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints, "write_checkpoint", fail)
            accept(acc, [0], [1.0])
            wait_until(lambda: "'emb' could not be saved" in caplog.text, "a line in the log")
        wait_until(lambda: files(folder) == ["emb.safetensors"], "a file")


def test_close_that_is_interrupted_has_saved_and_lets_go_of_the_folder(folder, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    server = gq.Server(checkpoint=folder, checkpoint_every=LATE)
    accept(server.accumulator("float32", (10, 1), "emb"), [0], [1.0])
    monkeypatch.setattr(server._service.rounds, "close_all", interrupt)
    with pytest.raises(KeyboardInterrupt):
        server.close()
    with serving(folder) as again:
        assert sparse(again).num_accumulated() == 1


def test_server_that_is_closed_during_a_save_from_time_to_time_ends_that_thread_quietly(folder, monkeypatch):
    begun, gate, errors = threading.Event(), threading.Event(), []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    monkeypatch.setattr(HostedRound, "try_to_save", lambda self: begun.set() or gate.wait(TIMEOUT))
    with serving(folder, every=0.01) as server:
        accept(sparse(server), [0], [1.0])
        assert begun.wait(TIMEOUT)
        savers = [thread for thread in threading.enumerate() if thread.name == "gradquorum-checkpoint"]
    gate.set()
    for saver in savers:
        saver.join(TIMEOUT)
        assert not saver.is_alive()
    assert savers
    assert not errors


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
