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
