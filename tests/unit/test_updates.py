"""What `SyncReplicas` does with a merged gradient: torch optimizers and optax transformations."""

import sys
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest

import gradquorum as gq

TIMEOUT = 60.0


def group_of(**members):
    return gq.AccumulatorGroup(members, expected_workers=2, max_per_worker=1, order="worker")


def two_members(dtype="float32"):
    return group_of(
        emb=gq.SparseSpec(dtype, (6, 2), "MEAN_BY_COUNT"),
        bias=gq.DenseSpec(dtype, (2,), "MEAN_BY_COUNT"),
    )


def make_round(sync, gradients):
    """Let each worker apply its gradient, and the chief make a round."""
    for index, gradient in enumerate(gradients):
        with sync.worker(index) as worker:
            worker.begin(timeout=TIMEOUT)
            assert worker.apply(gradient)
    assert sync.run(1, timeout=TIMEOUT) == 1


def gradients_of_step(step, dtype=np.float32):
    """Return what two workers offer: unsorted ids, with repeats; row 5 is never touched."""
    rng = np.random.default_rng(step)
    return [
        {
            "emb": (rng.integers(0, 5, 4), rng.standard_normal((4, 2)).astype(dtype)),
            "bias": rng.standard_normal(2).astype(dtype),
        }
        for _ in range(2)
    ]


def dense_mean(gradients):
    """Return the dense gradients of the mean loss, in float64."""
    emb, bias = np.zeros((6, 2)), np.zeros(2)
    for gradient in gradients:
        np.add.at(emb, gradient["emb"][0], gradient["emb"][1].astype(np.float64) / 2)
        bias += gradient["bias"].astype(np.float64) / 2
    return {"emb": emb, "bias": bias}


# Without any framework


class Transformation(NamedTuple):
    """What an optax transformation looks like: gradient descent with momentum, over a dict or one array."""

    init: object
    update: object


def momentum(rate=0.1, decay=0.9):
    def over(function, *trees):
        return {key: function(*(tree[key] for tree in trees)) for key in trees[0]} if isinstance(
            trees[0], dict
        ) else function(*trees)  # fmt: skip

    def update(gradients, state, params):
        assert set(params) == set(gradients) if isinstance(params, dict) else params.shape == gradients.shape
        state = over(lambda old, new: decay * old + new, state, gradients)
        return over(lambda velocity: -rate * velocity, state), state

    return Transformation(lambda params: over(np.zeros_like, params), update)


def test_transformation_changes_numpy_arrays_in_place_where_workers_read_them():
    emb, bias = np.ones((6, 2), np.float32), np.zeros(2, np.float32)
    expected = {"emb": emb.astype(np.float64), "bias": bias.astype(np.float64)}
    velocity = {"emb": 0.0, "bias": 0.0}
    params = {"emb": emb, "bias": bias}
    with gq.SyncReplicas(two_members(), 2, num_workers=2, update=momentum(), params=params) as sync:
        for step in range(4):
            gradients = gradients_of_step(step)
            make_round(sync, gradients)
            for name, gradient in dense_mean(gradients).items():
                velocity[name] = 0.9 * velocity[name] + gradient
                expected[name] -= 0.1 * velocity[name]
        assert sync.params["emb"] is emb
        assert sync.params["bias"] is bias
    np.testing.assert_allclose(emb, expected["emb"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(bias, expected["bias"], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(emb[5], 1.0)


def test_transformation_of_an_accumulator_has_one_array():
    table = np.zeros((3, 1), np.float64)
    acc = gq.SparseConditionalAccumulator("float64", (3, 1), expected_workers=1, max_per_worker=1)
    with gq.SyncReplicas(acc, 1, num_workers=1, update=momentum(), params=table) as sync:
        make_round(sync, [([2], np.float64([[10.0]]))])
        assert sync.params is table
    np.testing.assert_allclose(table, [[0], [0], [-1]])


def test_transformation_never_sees_parameters_that_change_under_it():
    seen = []

    def update(gradients, state, params):
        seen.append(params)
        return gradients, state

    table = np.zeros((3, 1), np.float32)
    acc = gq.SparseConditionalAccumulator("float32", (3, 1), expected_workers=1, max_per_worker=1)
    chain = Transformation(lambda params: seen.append(params), update)
    with gq.SyncReplicas(acc, 1, num_workers=1, update=chain, params=table) as sync:
        make_round(sync, [([2], np.float32([[10.0]]))])
    assert [params.max() for params in seen] == [0, 0]
    assert table.max() == 10


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (None, "params: expected the parameters that the optax transformation is to change"),
        ([1], "params: expected a mapping of members to parameters, got list"),
        (
            {"emb": np.zeros((6, 2), np.float32)},
            "expected a parameter named 'bias', a member of the group; got ['emb']",
        ),
        ({"emb": [[0.0]], "bias": [0.0]}, "params['emb']: expected an array or a tensor, got list"),
        ({"emb": np.zeros((6, 3), np.float32)}, "SparseSpec(float32, shape=(6, 2), MEAN_BY_COUNT), got shape (6, 3)"),
        ({"emb": np.zeros((6, 2))}, "got shape (6, 2) of float64"),
    ],
)
def test_parameters_that_do_not_fit_are_refused(params, words):
    with pytest.raises(gq.InvalidArgumentError) as caught:
        gq.SyncReplicas(two_members(), 2, num_workers=2, update=momentum(), params=params)
    assert words in str(caught.value)


def test_ids_beyond_the_parameter_are_refused_where_the_accumulator_did_not_know_its_rows():
    table = np.zeros((3, 1), np.float32)
    acc = gq.SparseConditionalAccumulator("float32", expected_workers=1, max_per_worker=1)
    sync = gq.SyncReplicas(acc, 1, num_workers=1, update=momentum(), params=table)
    with pytest.raises(gq.InvalidArgumentError, match="expected ids below 3, the rows of the parameter, got 3"):
        make_round(sync, [([1, 3], np.ones((2, 1), np.float32))])
    assert not table.any()


# torch


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def torch_model(torch, dtype=None):
    model = torch.nn.Module()
    model.emb = torch.nn.Parameter(torch.ones(6, 2, dtype=dtype))
    model.bias = torch.nn.Parameter(torch.zeros(2, dtype=dtype))
    model.other = torch.nn.Parameter(torch.full((3,), 7.0))
    return model


@pytest.mark.frameworks
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch's Adagrad makes one itself
@pytest.mark.parametrize("kind", ["SGD", "Adagrad"])
def test_torch_optimizer_does_what_it_does_with_the_gradients_of_one_process(torch, kind):
    def optimizer_of(model):
        return getattr(torch.optim, kind)(model.named_parameters(), lr=0.1)

    trained, alone = torch_model(torch), torch_model(torch)
    optimizer = optimizer_of(alone)
    with gq.SyncReplicas(two_members(), 2, num_workers=2, update=optimizer_of(trained)) as sync:
        for step in range(4):
            gradients = gradients_of_step(step)
            make_round(sync, gradients)
            mean = dense_mean(gradients)
            touched = np.unique(np.concatenate([gradient["emb"][0] for gradient in gradients]))
            alone.emb.grad = torch.sparse_coo_tensor(
                torch.tensor(touched)[None], torch.tensor(mean["emb"][touched], dtype=torch.float32), (6, 2),
                check_invariants=False,
            )  # fmt: skip
            alone.bias.grad = torch.tensor(mean["bias"], dtype=torch.float32)
            optimizer.step()
        assert sync.params["emb"] is trained.emb
    for parameter, expected in zip(trained.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected)
        assert parameter.grad is None
    assert (trained.emb[5] == 1).all()


@pytest.mark.frameworks
def test_torch_optimizer_is_given_coalesced_sparse_gradients(torch):
    seen = []

    class Watching(torch.optim.SGD):
        def step(self, closure=None):
            seen.extend(parameter.grad for parameter in self.param_groups[0]["params"])
            super().step(closure)

    model = torch_model(torch)
    with gq.SyncReplicas(two_members(), 2, num_workers=2, update=Watching(model.named_parameters(), lr=0.1)) as sync:
        make_round(sync, [{"emb": ([3, 1, 3], np.ones((3, 2), np.float32))}, {"bias": np.ones(2, np.float32)}])
    emb, bias, other = seen
    assert emb.is_sparse
    assert emb.is_coalesced()
    assert emb.indices().tolist() == [[1, 3]]
    assert emb.values().tolist() == [[0.5, 0.5], [1.0, 1.0]]
    assert not bias.is_sparse
    assert other is None


@pytest.mark.frameworks
def test_torch_sparse_adam_trains_one_table_of_an_accumulator(torch):
    embedding = torch.nn.Embedding(6, 2, sparse=True)
    before = embedding.weight.detach().clone()
    acc = gq.SparseConditionalAccumulator("float32", (6, 2), expected_workers=2, max_per_worker=1)
    update = torch.optim.SparseAdam(embedding.parameters(), lr=0.1)
    with gq.SyncReplicas(acc, 2, num_workers=2, update=update) as sync:
        gradients = []
        for ids in ([1, 3], [3, 5]):
            loss = embedding(torch.tensor(ids)).sum()
            gradients.append(torch.autograd.grad(loss, embedding.weight)[0])  # a sparse tensor, as it is
        make_round(sync, gradients)
    changed = (embedding.weight != before).any(dim=1)
    assert changed.tolist() == [False, True, False, True, False, True]


@pytest.mark.frameworks
def test_torch_bfloat16_parameters_are_updated(torch):
    parameter = torch.nn.Parameter(torch.zeros(6, 2, dtype=torch.bfloat16))
    acc = gq.SparseConditionalAccumulator("bfloat16", (6, 2), expected_workers=1, max_per_worker=1)
    with gq.SyncReplicas(acc, 1, num_workers=1, update=torch.optim.SGD([parameter], lr=1.0)) as sync:
        make_round(sync, [([4], np.array([[1.5, -2.0]], ml_dtypes.bfloat16))])
    assert parameter.tolist()[4] == [-1.5, 2.0]


@pytest.mark.frameworks
def test_torch_optimizer_that_does_not_fit_is_refused(torch):
    model = torch_model(torch)

    def refused(update, group=None, **options):
        with pytest.raises(gq.InvalidArgumentError) as caught:
            gq.SyncReplicas(group or two_members(), 2, num_workers=2, update=update, **options)
        return str(caught.value)

    assert "knows the names of its parameters" in refused(torch.optim.SGD(model.parameters(), lr=0.1))
    assert "a parameter named 'emb'" in refused(torch.optim.SGD([("bias", model.bias)], lr=0.1))
    wrong = torch.optim.SGD([("emb", model.emb), ("bias", model.other)], lr=0.1)
    assert "params['bias']: expected what fits DenseSpec" in refused(wrong)
    acc = gq.SparseConditionalAccumulator("float32", (6, 2), expected_workers=2, max_per_worker=1)
    assert "an optimizer of one parameter" in refused(torch.optim.SGD(model.parameters(), lr=0.1), acc)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    gq.SyncReplicas(two_members(), 2, num_workers=2, update=sgd, params={"emb": model.emb, "bias": model.bias})


@pytest.mark.frameworks
def test_torch_is_never_given_ids_beyond_its_parameter(torch):
    parameter = torch.nn.Parameter(torch.zeros(3, 1))
    acc = gq.SparseConditionalAccumulator("float32", expected_workers=1, max_per_worker=1)
    sync = gq.SyncReplicas(acc, 1, num_workers=1, update=torch.optim.SGD([parameter], lr=1.0))
    with pytest.raises(gq.InvalidArgumentError, match="expected ids below 3"):
        make_round(sync, [([2**40], np.ones((1, 1), np.float32))])


def test_framework_is_not_loaded_by_its_recognition():
    loaded = {"torch", "optax", "jax"} & set(sys.modules)
    gq.SyncReplicas(two_members(), 2, num_workers=2, update=print)
    assert {"torch", "optax", "jax"} & set(sys.modules) == loaded


# optax


@pytest.mark.frameworks
@pytest.mark.parametrize("kind", ["numpy", "jax"])
def test_optax_does_what_it_does_with_the_gradients_of_one_process(kind):
    optax = pytest.importorskip("optax")
    jnp = pytest.importorskip("jax.numpy")
    asarray = np.array if kind == "numpy" else jnp.asarray
    params = {"emb": asarray(np.ones((6, 2), np.float32)), "bias": asarray(np.zeros(2, np.float32))}
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))
    alone = {name: jnp.array(array) for name, array in params.items()}
    state = chain.init(alone)
    given = dict(params)
    with gq.SyncReplicas(two_members(), 2, num_workers=2, update=chain, params=params) as sync:
        for step in range(4):
            gradients = gradients_of_step(step)
            make_round(sync, gradients)
            dense = {name: jnp.asarray(array, jnp.float32) for name, array in dense_mean(gradients).items()}
            updates, state = chain.update(dense, state, alone)
            alone = optax.apply_updates(alone, updates)
        found = sync.params
    for name in alone:
        np.testing.assert_allclose(found[name], alone[name], rtol=1e-5, atol=1e-6)
        assert (found[name] is given[name]) == (kind == "numpy")
        assert isinstance(found[name], type(given[name]))
