"""TensorFlow's parameter server over gRPC: an accumulator on its device, and workers in processes of their own."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.cases import Case

FUTURE_STEP = 2**62
"""Never stale."""


def free_cluster(num_workers: int) -> dict[str, list[str]]:
    """Return addresses that nobody listens at now."""
    sockets = [socket.create_server(("localhost", 0)) for _ in range(num_workers + 1)]
    addresses = [f"localhost:{sock.getsockname()[1]}" for sock in sockets]
    for sock in sockets:
        sock.close()
    return {"ps": addresses[:1], "worker": addresses[1:]}


def _start(cluster: dict[str, list[str]], job: str, index: int) -> tuple[Any, Any]:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    return tf, tf.distribute.Server(tf.train.ClusterSpec(cluster), job_name=job, task_index=index)


def serve(connection: Connection, cluster: dict[str, list[str]]) -> None:
    """Be the parameter server until told to end."""
    _server = _start(cluster, "ps", 0)
    connection.send("ready")
    connection.recv()


def prepare_worker(
    cluster: dict[str, list[str]], index: int, case: Case
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return what worker `index` is timed for, one apply, and what empties the accumulator."""
    tf, server = _start(cluster, "worker", index)
    v1 = tf.compat.v1
    ids_now, values_now = case.gradients()[index]
    with tf.Graph().as_default() as graph:
        with tf.device("/job:ps/task:0"):
            accumulator = v1.SparseConditionalAccumulator(tf.float32, shape=[None, case.dim], shared_name=case.name)
        with tf.device(f"/job:worker/task:{index}"):
            ids, values = v1.placeholder(tf.int64, [None]), v1.placeholder(tf.float32, [None, case.dim])
        apply_op = accumulator.apply_grad(ids, values, local_step=FUTURE_STEP)
        take_op = accumulator.take_grad(1)[0]
        count_op = accumulator.num_accumulated()
    session = v1.Session(server.target, graph=graph)
    apply = session.make_callable(apply_op, feed_list=[ids, values])

    def empty() -> None:
        if session.run(count_op):
            session.run(take_op)

    return lambda: apply(ids_now, values_now), empty
