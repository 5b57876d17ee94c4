"""Workers that Ray Train starts: pip install 'gradquorum[ray]' 'ray[train]', then run this."""

import tempfile
import threading

import numpy as np
import ray
import ray.train
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

import gradquorum as gq
from gradquorum.ray import Target

NUM_WORKERS, NUM_STEPS = 2, 5


def work(config):
    """Be one of Ray Train's workers: offer gradients of a loss that pulls the rows of its ids towards 1."""
    rank = ray.train.get_context().get_world_rank()
    rng = np.random.default_rng(rank)
    acc, parameters = config["acc"], config["parameters"]
    with acc.worker(rank) as worker:
        while (step := worker.begin()) < NUM_STEPS:
            table = ray.get(parameters.get.remote())
            ids = rng.integers(0, len(table), 8)
            worker.apply_grad(ids, table[ids] - 1.0)
            acc.wait_published(step + 1)
    ray.train.report({"last_step": step})


@ray.remote(num_cpus=0)
class Parameters:
    def __init__(self):
        self.table = np.zeros((20, 1), np.float32)

    def get(self):
        return self.table

    def update(self, indices, values):
        table = self.table.copy()  # whoever has the old one keeps it
        table[indices] -= 0.5 * values
        self.table = table


def be_chief(acc, parameters):
    for gradient in acc.rounds(NUM_WORKERS):
        ray.get(parameters.update.remote(gradient.indices, gradient.values))
        print(f"step {gradient.step}: {gradient.num_gradients} gradients of workers {gradient.workers}")
        if gradient.step + 1 == NUM_STEPS:
            acc.publish(NUM_STEPS)
            break


def main():
    ray.init(num_cpus=NUM_WORKERS, include_dashboard=False, ignore_reinit_error=True)
    options = {"expected_workers": NUM_WORKERS, "max_per_worker": 1}
    acc = gq.SparseConditionalAccumulator("float32", (20, 1), "train", target=Target(num_shards=2), **options)
    parameters = Parameters.remote()
    chief = threading.Thread(target=be_chief, args=(acc, parameters))
    chief.start()
    with tempfile.TemporaryDirectory() as folder:
        DataParallelTrainer(
            work,
            train_loop_config={"acc": acc, "parameters": parameters},
            scaling_config=ray.train.ScalingConfig(num_workers=NUM_WORKERS),
            run_config=ray.train.RunConfig(storage_path=folder),
        ).fit()
    chief.join()
    distance = np.abs(ray.get(parameters.get.remote()) - 1.0).mean()
    print(f"distance from what the loss asks for: {distance:.2f}")
    acc.close(for_all=True)


if __name__ == "__main__":
    main()
    ray.shutdown()
