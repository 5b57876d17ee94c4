"""Workers that are plain Ray tasks, a chief that updates a table: pip install 'gradquorum[ray]', then run this."""

import numpy as np
import ray

import gradquorum as gq
from gradquorum.ray import Target, watch

NUM_WORKERS, NUM_STEPS = 3, 5


@ray.remote
def work(acc, name, table_of):
    """Offer gradients of a loss that pulls the rows of this worker's ids towards 1."""
    rng = np.random.default_rng(name)
    with acc.worker(name) as worker:
        while (step := worker.begin()) < NUM_STEPS:
            table = ray.get(table_of.get.remote())
            ids = rng.integers(0, len(table), 8)
            try:
                worker.apply_grad(ids, table[ids] - 1.0)
                acc.wait_published(step + 1)
            except gq.UnavailableError as error:
                print(f"worker {name}: the round was lost, with {error.resend}; on to the next")
            except gq.ClosedError:
                return


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


def main():
    ray.init(num_cpus=NUM_WORKERS, include_dashboard=False, ignore_reinit_error=True)
    options = {"expected_workers": NUM_WORKERS, "max_per_worker": 1}
    acc = gq.SparseConditionalAccumulator("float32", (20, 1), "example", target=Target(num_shards=2), **options)
    parameters = Parameters.remote()
    calls = {name: work.remote(acc, name, parameters) for name in range(NUM_WORKERS)}
    watch(acc, calls)  # a worker that fails ends the take, with its error
    for gradient in acc.rounds(NUM_WORKERS - 1):  # one may be late
        ray.get(parameters.update.remote(gradient.indices, gradient.values))
        print(f"step {gradient.step}: {gradient.num_gradients} gradients of workers {gradient.workers}")
        if gradient.step + 1 == NUM_STEPS:
            acc.publish(NUM_STEPS)
            break
    ray.get(list(calls.values()))
    print(f"mean of the table: {ray.get(parameters.get.remote()).mean():.2f}")
    acc.close(for_all=True)


if __name__ == "__main__":
    main()
    ray.shutdown()
