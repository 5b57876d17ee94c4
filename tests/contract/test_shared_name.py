"""SEMANTICS 1: `shared_name` within one target."""

import gc

import pytest

import gradquorum as gq
from tests.support import accept, assert_rows

SPEC = {"dtype": "float32", "shape": (5, 1), "reduction_type": "MEAN"}


def test_shared_name_first_use_creates_later_ones_attach(make):
    name = make.shared_name()
    one, other = make.sparse("float32", (5, 1), shared_name=name), make.sparse("float32", (5, 1), shared_name=name)
    accept(one, [0], [1.0], worker="w", sequence=7)
    accept(other, [0], [3.0])
    one.set_global_step(4)
    one.publish()
    assert (other.global_step, other.published_step, other.num_accumulated(), other.last_sequence("w")) == (4, 4, 2, 7)
    assert_rows(other.take_grad(2, timeout=0), [0], [2.0])
    assert one.num_accumulated() == 0


def test_shared_name_none_is_never_shared(make):
    one, other = make.sparse("float32", (5, 1)), make.sparse("float32", (5, 1))
    accept(one, [0], [1.0])
    assert other.num_accumulated() == 0


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"dtype": "float64"}, ["float32", "float64"]),
        ({"shape": (6, 1)}, ["5, 1", "6, 1"]),
        ({"shape": None}, ["5, 1", "None"]),
        ({"reduction_type": "SUM"}, ["MEAN", "SUM"]),
        ({"order": "worker"}, ["order", "worker"]),
        ({"compact": False}, ["compact", "False"]),
        ({"accumulate_dtype": "float64"}, ["float64"]),
        ({"on_nonfinite": "skip"}, ["on_nonfinite", "skip"]),
        ({"expected_workers": 3}, ["expected_workers", "3"]),
        ({"max_per_worker": 3}, ["max_per_worker", "3"]),
        ({"max_bytes": 4096}, ["max_bytes", "4096"]),
    ],
    ids=str,
)
def test_shared_name_of_another_spec_raises_and_prints_both(make, changed, words):
    name = make.shared_name()
    first = make.sparse(**SPEC, shared_name=name)
    accept(first, [0], [1.0])
    with pytest.raises(gq.InvalidArgumentError) as caught:
        make.sparse(**{**SPEC, **changed}, shared_name=name)
    for word in [name, *words]:
        assert word in str(caught.value)
    assert first.num_accumulated() == 1
    first.close()
    assert make.sparse(**{**SPEC, **changed}, shared_name=name).num_accumulated() == 0


def test_shared_name_of_another_kind_raises_and_prints_both(make):
    name = make.shared_name()
    make_keep = make.sparse(**SPEC, shared_name=name)
    with pytest.raises(gq.InvalidArgumentError) as caught:
        make.dense(**SPEC, shared_name=name)
    assert "SparseConditionalAccumulator" in str(caught.value)
    assert "ConditionalAccumulator" in str(caught.value).replace("SparseConditionalAccumulator", "")
    with pytest.raises(gq.InvalidArgumentError):
        make.group({"x": gq.SparseSpec("float32", (5, 1))}, shared_name=name)
    assert not make_keep.closed


@pytest.mark.parametrize("same", [{"dtype": "f4"}, {"shape": [5, 1]}, {"name": "other"}, {"num_threads": 2}], ids=str)
def test_shared_name_with_options_that_change_no_result_attaches(make, same):
    name = make.shared_name()
    first = make.sparse(**SPEC, shared_name=name)
    accept(first, [0], [1.0])
    assert make.sparse(**{**SPEC, **same}, shared_name=name).num_accumulated() == 1


def test_shared_name_of_groups_compares_members(make):
    name = make.shared_name()
    spec = {"a": gq.SparseSpec("float32", (5, 1)), "b": gq.DenseSpec("float32", (2,))}
    one, other = make.group(spec, shared_name=name), make.group(spec, shared_name=name)
    one.apply({"b": [1.0, 2.0]})
    assert other.num_accumulated() == 1
    for wrong in ({"a": spec["a"]}, {**spec, "b": gq.DenseSpec("float32", (3,))}, {"a": spec["b"], "b": spec["a"]}):
        with pytest.raises(gq.InvalidArgumentError):
            make.group(wrong, shared_name=name)


def test_shared_name_lives_as_long_as_a_handle_to_it(make):
    name = make.shared_name()
    one, other = make.sparse(**SPEC, shared_name=name), make.sparse(**SPEC, shared_name=name)
    accept(one, [0], [1.0])
    one.close()
    third = make.sparse(**SPEC, shared_name=name)
    assert third.num_accumulated() == 1
    other.close()
    third.close()
    assert make.sparse("float64", None, shared_name=name).num_accumulated() == 0


def test_shared_name_ends_with_the_last_handle_even_if_nobody_closed_it(make):
    name = make.shared_name()
    acc = make.sparse(**SPEC, shared_name=name)
    accept(acc, [0], [1.0])
    del acc
    gc.collect()
    assert make.sparse("float64", (5, 1), shared_name=name).num_accumulated() == 0


def test_shared_name_closed_for_all_is_free_again(make):
    name = make.shared_name()
    one, other = make.sparse(**SPEC, shared_name=name), make.sparse(**SPEC, shared_name=name)
    one.close(for_all=True)
    assert make.sparse("float64", (5, 1), shared_name=name).num_accumulated() == 0
    assert other.closed


@pytest.mark.parametrize("name", [3, b"x", ("a",)])
def test_shared_name_that_is_no_string_raises(make, name):
    with pytest.raises(gq.InvalidArgumentError, match="shared_name"):
        make.sparse("float32", shared_name=name)


def test_shared_name_used_by_many_threads_at_once_makes_one(make, run_thread):
    name = make.shared_name()
    calls = [run_thread(make.sparse, **SPEC, shared_name=name) for _ in range(8)]
    handles = [call.result() for call in calls]
    for handle in handles:
        accept(handle, [0], [1.0])
    assert {handle.num_accumulated() for handle in handles} == {8}
