"""Specs and options: values that do not change, compare by what they say, and travel."""

import copy
import pickle

import pytest

import gradquorum as gq
from gradquorum.specs import Options, RoundSpec

SPECS = [gq.SparseSpec("float32", (None, 3), "SUM"), gq.DenseSpec("complex64"), gq.SparseSpec("bfloat16", (5,))]


def travelled(value):
    return [copy.copy(value), copy.deepcopy(value), *(pickle.loads(pickle.dumps(value, p)) for p in range(2, 6))]


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_spec_travels_and_compares_by_what_it_says(spec):
    assert all(other == spec and hash(other) == hash(spec) for other in travelled(spec))
    assert spec != gq.SparseSpec("float64", (None, 3), "SUM")
    assert spec != (spec.dtype, spec.shape, spec.reduction_type)


def test_sparse_and_dense_specs_of_the_same_words_differ():
    assert gq.SparseSpec("float32", (3,)) != gq.DenseSpec("float32", (3,))


def test_spec_does_not_change():
    spec = gq.SparseSpec("float32", (5, 1))
    for name in ("dtype", "shape", "reduction_type", "other"):
        with pytest.raises(AttributeError, match="does not change"):
            setattr(spec, name, None)
        with pytest.raises(AttributeError):
            delattr(spec, name)
    assert spec == gq.SparseSpec("float32", (5, 1))


def test_options_travel():
    options = Options(order="worker", max_bytes=5, accumulate_dtype="float64")
    assert all(type(other) is Options and other == options for other in travelled(options))


def test_round_spec_travels():
    spec = RoundSpec("AccumulatorGroup", dict(zip("abc", SPECS, strict=True)), Options())
    for other in travelled(spec):
        assert other == spec
        assert other.describe() == spec.describe()
