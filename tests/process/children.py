"""What the tests run in processes of their own. Children that are spawned import this module, and nothing of pytest."""

import os
import signal

import numpy as np


def add(table, amount):
    table[...] += amount


def add_received(inbox, outbox, amount):
    """Add to the table that comes through the inbox, then hand on the handle that this process makes of it."""
    table = inbox.get()
    table[...] += amount
    outbox.put(table)
    inbox.get()  # the handle is good as long as this process has the table


def hold(table, connection):
    """Say that the table is here, then keep it until told."""
    connection.send(float(table[0]))
    connection.recv()
    connection.send(float(table[0]))


def fill_until(table, enough):
    """Write numbers, each into the whole table, until told."""
    while not enough:
        table[...] = table.version + 1


def fill_row(table, row, versions):
    for version in range(1, versions + 1):
        table[row] = version


class Killer:
    """Values whose assignment kills the process in its midst."""

    def __array__(self, dtype=None, copy=None):
        os.kill(os.getpid(), signal.SIGKILL)


def die_writing(table):
    table[0] = 5.0
    table[1] = Killer()


def make_and_die(connection):
    """Hand out the handle of a table, and be killed once it has been used."""
    import gradquorum as gq

    table = gq.shared_table(4, "float32")
    table[...] = np.arange(4)
    connection.send(table)
    connection.recv()
    os.kill(os.getpid(), signal.SIGKILL)


# Clients and servers


def host(connection, address, answer_seconds=None):
    """Be a server until told; with short deadlines, say often that replies are to come."""
    import gradquorum as gq
    from gradquorum.targets.process import link, server

    if answer_seconds is not None:
        server.HEARTBEAT_SECONDS = link.HEARTBEAT_SECONDS = answer_seconds / 5
    with gq.Server(address):
        connection.send("ready")
        connection.recv()


def die_sending(kind):
    """Let this process die as it is about to send a message of this kind."""
    from gradquorum.targets.process.client import Client

    send = Client.send

    def sending(self, connection, message):
        if type(message).__name__ == kind:
            os.kill(os.getpid(), signal.SIGKILL)
        send(self, connection, message)

    Client.send = sending


def apply_once(acc, value):
    acc.apply_grad([3], [[value]], local_step=None)


def apply_and_die(address, name, num_rows, kind):
    import gradquorum as gq

    die_sending(kind)
    gq.attach(name, address).apply_grad(np.arange(num_rows), np.ones((num_rows, 4), np.float32), local_step=None)


def take_and_die(address, name, kind):
    import gradquorum as gq

    die_sending(kind)
    gq.attach(name, address).take_grad(1)


def be_worker(connection, address, name, worker):
    """Join, say so, and apply once for each step that is sent."""
    import gradquorum as gq

    acc = gq.attach(name, address)
    member = acc.worker(worker)
    connection.send("joined")
    while connection.recv() is not None:
        member.begin()
        member.apply_grad([0], [[1.0]])
        connection.send(acc.last_sequence(worker))


def apply_numbered(address, name, worker, number):
    """Apply so many gradients, numbered on from the last, and be killed."""
    import gradquorum as gq

    acc = gq.attach(name, address)
    first = acc.last_sequence(worker) + 1
    for sequence in range(first, first + number):
        assert acc.apply_grad([0], [[1.0]], local_step=None, worker=worker, sequence=sequence)
    os.kill(os.getpid(), signal.SIGKILL)
