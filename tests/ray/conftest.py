import itertools

import pytest

import gradquorum as gq

_numbers = itertools.count()


@pytest.fixture
def name():
    """A shared name that no other test uses."""
    return f"ray-{next(_numbers)}"


@pytest.fixture
def pooled(ray_pool):
    """Use actors of the pool: for tests whose rounds nobody but themselves has to find, and who kill nobody."""
    with ray_pool.used():
        yield


@pytest.fixture
def actors(ray_cluster):
    """Find the coordinator and the shards of an accumulator; all end with the test."""
    opened = []

    def find(acc):
        opened.append(acc)
        client = acc._target._client
        return client.coordinator, client.shards

    yield find
    for acc in opened:
        acc.close(for_all=True)


@pytest.fixture
def make(ray_cluster, name):
    """Make accumulators of 100 rows, and close them when the test ends."""
    from gradquorum.ray import Target

    made = []

    def sparse(num_shards=2, row=(1,), **options):
        target = Target(num_shards)
        options = {"reduction_type": "SUM", **options}
        made.append(gq.SparseConditionalAccumulator("float64", (100, *row), name, target=target, **options))
        return made[-1]

    yield sparse
    for acc in made:
        acc.close(for_all=True)
