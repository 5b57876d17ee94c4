"""Where a server may be made, and what a client is told where there is none."""

import stat

import pytest

import gradquorum as gq
from gradquorum.targets.process.address import Address


def test_server_in_a_folder_that_is_not_there_expect_it_made_for_this_user_only(tmp_path):
    folder = tmp_path / "my-run"
    with gq.Server(folder / "server") as server:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        acc = gq.SparseConditionalAccumulator("float32", (5, 1), "emb", target=server.address)
        assert acc.apply_grad([1], [[1.0]])
    assert not list(folder.iterdir())
    with gq.Server(folder / "server"):  # and where it is there
        pass


def test_server_below_a_folder_that_is_not_there_expect_which_one_and_what_to_do(tmp_path):
    folder = tmp_path / "a" / "b"
    with pytest.raises(gq.InvalidArgumentError, match=f"the folder {folder} is not there.*mkdir -p {folder}"):
        gq.Server(folder / "server")
    assert not list(tmp_path.iterdir())


def test_server_when_it_cannot_listen_expect_no_folder_left(tmp_path, monkeypatch):
    def refuse(_):
        raise OSError("no descriptors")

    monkeypatch.setattr(Address, "_listen", refuse)
    with pytest.raises(OSError, match="no descriptors"):
        gq.Server(tmp_path / "my-run" / "server")
    assert not list(tmp_path.iterdir())


def test_client_when_there_is_no_server_expect_how_to_start_one(tmp_path):
    with pytest.raises(gq.UnavailableError, match=f"no server at .*gradquorum serve --address {tmp_path}/server"):
        gq.SparseConditionalAccumulator("float32", (5, 1), "emb", target=tmp_path / "server")


@pytest.mark.parametrize(("key", "got"), [("secret", "got str"), (b"", "got b''")])
def test_key_that_is_none_expect_its_type_and_never_the_key(tmp_path, key, got):
    with pytest.raises(gq.InvalidArgumentError, match=f"authkey: expected bytes.*{got}$") as caught:
        gq.Server(tmp_path / "server", authkey=key)
    assert "secret" not in str(caught.value)


def test_attach_without_a_target_expect_what_to_give():
    with pytest.raises(gq.InvalidArgumentError, match=r"no such round.*target=.*gradquorum\.connect"):
        gq.attach("nothing of that name")


def test_target_that_is_a_name_expect_an_absolute_path():
    with pytest.raises(gq.InvalidArgumentError, match=r"a path with a '/' in it.*write './server'.*got 'server'"):
        gq.SparseConditionalAccumulator("float32", (5, 1), "emb", target="server")


@pytest.mark.parametrize("address", [5, b"/tmp/server", ["/tmp/server"]])
def test_address_that_is_no_path_is_refused_by_all_that_take_one(address):
    for call in (gq.Server, gq.connect):
        with pytest.raises(gq.InvalidArgumentError, match="address: expected a path, got "):
            call(address)
