"""The wire: whole messages with caps and deadlines, keys that must match, addresses that have one server."""

import os
import select
import socket
import stat
import struct
import sys
import threading

import pytest

import gradquorum as gq

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="several processes need Linux")
if sys.platform == "linux":
    from gradquorum.targets.process.address import Address, dial, find_key
    from gradquorum.targets.process.channel import BrokenChannel, Channel


@pytest.fixture
def pair():
    one, two = socket.socketpair(socket.AF_UNIX)
    channels = Channel(one, timeout=60), Channel(two, timeout=60)
    yield channels
    for channel in channels:
        channel.close()


def test_messages_and_descriptors_arrive_in_order(pair):
    one, two = pair
    descriptor = os.memfd_create("test")
    one.send(b"first", descriptor)
    one.send(b"")
    one.send(b"x" * 40_000)
    assert two.receive() == b"first"
    received = two.receive_descriptor()
    assert os.path.sameopenfile(received, descriptor)
    assert two.receive() == b""
    assert two.receive() == b"x" * 40_000
    os.close(received)
    os.close(descriptor)


def test_message_longer_than_the_buffer_of_the_socket_arrives_whole(pair, run_thread):
    one, two = pair
    message = bytes(range(256)) * 4096
    call = run_thread(one.send, message)
    assert two.receive() == message
    call.result()


def test_what_was_read_ahead_comes_next_and_is_not_the_end(pair):
    one, two = pair
    for message in (b"first", b"", b"x" * 4000, b"last"):
        one.send(message)
    one.shut_down()
    assert not two.has_read_ahead
    assert two.receive(ahead=True) == b"first"
    assert two.has_read_ahead and two.readable(0) and not two.at_end
    assert two.receive() == b""
    assert two.receive(ahead=True) == b"x" * 4000
    assert two.receive(ahead=True) == b"last"
    assert two.at_end and not two.has_read_ahead
    with pytest.raises(BrokenChannel):
        two.receive(ahead=True)


def test_what_was_read_ahead_can_be_polled_for_no_more(pair):
    one, two = pair
    one.send(b"first")
    one.send(b"second")
    assert two.receive(ahead=True) == b"first"
    poll = select.poll()
    poll.register(two.fileno(), select.POLLIN)
    assert not poll.poll(0) and two.readable(0)
    assert two.receive() == b"second"
    assert not two.readable(0)


def test_descriptor_after_what_was_read_ahead_arrives(pair):
    one, two = pair
    descriptor = os.memfd_create("test")
    one.send(b"first")
    one.send(b"late")
    assert two.receive(ahead=True) == b"first"
    one.send(b"second", descriptor)
    assert [two.receive(), two.receive()] == [b"late", b"second"]
    received = two.receive_descriptor()
    assert os.path.sameopenfile(received, descriptor)
    os.close(received)
    os.close(descriptor)


@pytest.mark.parametrize("ahead", [False, True])
def test_message_of_almost_any_length_arrives_whole_read_ahead_or_not(pair, run_thread, ahead):
    one, two = pair
    lengths = [*range(9), *range(8180, 8200), 16_380, 40_000, 1 << 20]

    def send():
        for length in lengths:
            one.send(bytes([length % 251]) * length)

    call = run_thread(send)
    for length in lengths:
        assert two.receive(ahead=ahead) == bytes([length % 251]) * length
    call.result()


def test_message_in_single_bytes_arrives_whole_and_the_next_one_after_it():
    one, two = socket.socketpair(socket.AF_UNIX)
    channel = Channel(two, timeout=60)
    for byte in struct.pack("!i", 3) + b"abc" + struct.pack("!i", 0) + struct.pack("!i", 1) + b"d":
        one.send(bytes([byte]))
    assert [channel.receive(), channel.receive(), channel.receive()] == [b"abc", b"", b"d"]
    one.close()
    channel.close()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    "raw",
    [
        struct.pack("!i", 101),
        struct.pack("!iQ", -1, 2**62),
        struct.pack("!i", -(2**31)),
        struct.pack("!i", 100) + b"cut",
        b"\0",
    ],
)
def test_message_that_is_too_long_or_cut_off_breaks_the_channel(raw, ahead):
    one, two = socket.socketpair(socket.AF_UNIX)
    channel = Channel(two)
    one.sendall(raw)
    one.shutdown(socket.SHUT_WR)
    with pytest.raises(BrokenChannel):
        channel.receive(100, ahead=ahead)
    one.close()
    channel.close()


def test_silence_breaks_the_channel_at_its_deadline():
    one, two = socket.socketpair(socket.AF_UNIX)
    channel = Channel(two, timeout=0.05)
    assert not channel.readable(0)
    with pytest.raises(BrokenChannel, match="no answer"):
        channel.receive()
    one.close()
    assert channel.readable(0)
    assert channel.at_end
    channel.close()


def test_short_message_is_sent_at_once_or_not_at_all(pair):
    one, two = pair
    assert one.send_at_once(b"beat")
    assert two.receive() == b"beat"
    with one._lock:  # somebody is sending
        assert one.send_at_once(b"beat")
    assert not two.readable(0)
    two.close()
    assert not one.send_at_once(b"beat")


@pytest.mark.parametrize("key", [b"right", b"wrong"])
def test_only_who_knows_the_key_gets_through(pair, key):
    server, client = pair
    errors = []

    def demand():
        try:
            server.demand_key(b"right")
        except BrokenChannel as error:
            errors.append(error)
            server.shut_down()

    thread = threading.Thread(target=demand)
    thread.start()
    if key == b"right":
        client.show_key(key)
    else:
        with pytest.raises(BrokenChannel, match="key"):
            client.show_key(key)
    thread.join()
    assert bool(errors) is (key != b"right")


def test_address_has_one_server_and_files_for_its_user_only(tmp_path):
    place = Address(tmp_path / "s", None)
    for name in ("s", "s.key"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    assert find_key(place.path) == place.key
    with pytest.raises(gq.InvalidArgumentError, match="living"):
        Address(tmp_path / "s", None)
    dial(place.path).close()
    place.remove()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(gq.UnavailableError):
        dial(place.path)


def test_what_a_dead_server_left_is_replaced_and_what_is_no_socket_is_not(tmp_path):
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(tmp_path / "s"))
    left.close()
    (tmp_path / "s.key").write_bytes(b"old")
    place = Address(tmp_path / "s", None)
    assert find_key(place.path) == place.key != b"old"
    place.remove()
    (tmp_path / "s").write_text("a file of the user's")
    with pytest.raises(gq.InvalidArgumentError, match="no socket"):
        Address(tmp_path / "s", None)
    assert (tmp_path / "s").read_text() == "a file of the user's"
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_given_key_is_not_written_down(tmp_path):
    place = Address(tmp_path / "s", b"secret")
    assert (tmp_path / "s.key").read_bytes() == b""
    assert find_key(place.path) == b"secret"
    place.remove()
    with pytest.raises(gq.UnavailableError):
        find_key(place.path)


@pytest.mark.parametrize("path", ["/" + "x" * 104, "/a\0b"])
def test_path_that_no_socket_can_have_is_refused(path):
    with pytest.raises(gq.InvalidArgumentError):
        Address(path, None)
