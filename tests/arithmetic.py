"""The arithmetic of SEMANTICS 3, written down once more: rows in dicts, one NumPy operation at a time."""

import ml_dtypes
import numpy as np

WIDE = {"float16": np.float32, "bfloat16": np.float32, "int32": np.int64}
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def as_dtype(name):
    return BFLOAT16 if name == "bfloat16" else np.dtype(name)


def wide_dtype(dtype, accumulate_dtype=None):
    return np.dtype(accumulate_dtype or WIDE.get(dtype.name, dtype))


@np.errstate(all="ignore")
def coalesce(indices, values, wide):
    """Return {id: row}: repeats summed in order of appearance, from the first row on."""
    rows = {}
    for i, row in zip(indices, values.astype(wide), strict=True):
        rows[int(i)] = rows[int(i)] + row if int(i) in rows else row.copy()
    return rows


@np.errstate(all="ignore")
def reduce_round(gradients, dtype, reduction="MEAN", accumulate_dtype=None, weights=None):
    """Return ids, values and counts of a round of `(indices, values)` in their order of addition."""
    wide = wide_dtype(dtype, accumulate_dtype)
    sums, counts = {}, {}
    for number, (indices, values) in enumerate(gradients):
        for i, row in coalesce(indices, values, wide).items():
            if weights is not None:
                row = row * wide.type(weights[number])
            sums[i] = sums[i] + row if i in sums else row
            counts[i] = counts.get(i, 0) + 1
    ids = sorted(sums)
    rows = [np.asarray(_divide(sums[i], counts[i], reduction, len(gradients), weights, wide)) for i in ids]
    row_shape = next((values.shape[1:] for _, values in gradients if len(values)), ())
    result = np.array(rows, wide).reshape(len(ids), *row_shape).astype(dtype)
    return np.array(ids, np.int64), result, np.array([counts[i] for i in ids], np.int64)


def _divide(total, count, reduction, num_gradients, weights, wide):
    if reduction == "SUM":
        return total
    if reduction == "MEAN_BY_WEIGHT":
        denominator = sum(float(wide.type(weight)) for weight in weights)
    else:
        denominator = count if reduction == "MEAN" else num_gradients
    real = np.dtype(f"f{wide.itemsize // 2}") if wide.kind == "c" else wide
    return (total.view(real) / real.type(denominator)).view(wide)


def random_gradients(rng, count, num_ids, width, dtype, *, unique=True, most=None):
    """Return `count` gradients of random ids below `num_ids`, with rows of different magnitudes."""
    gradients = []
    for _ in range(count):
        n = int(rng.integers(1, (most or num_ids) + 1))
        ids = rng.choice(num_ids, n, replace=False) if unique else rng.integers(0, num_ids, n)
        ids = np.sort(ids) if unique else ids
        shape = (n, width)
        values = rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4, shape)
        if dtype.kind == "c":
            values = values + 1j * rng.standard_normal(shape)
        if dtype.kind == "i":
            values = rng.integers(-(2**31), 2**31, shape)
        gradients.append((ids.astype(np.int64), values.astype(dtype)))
    return gradients
