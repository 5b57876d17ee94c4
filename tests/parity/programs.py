"""Programs for accumulators, in plain data: what is recorded, and what is run on both sides."""

import dataclasses

import numpy as np


@dataclasses.dataclass
class Program:
    """One accumulator and what is done to it.

    Attributes:
        number: which program of its seed.
        kind: "sparse" or "dense".
        dtype, shape, reduction: what the accumulator is built with.
        steps: dicts with `op` ("apply", "take", "set_step"), its arguments, and what must come of it:
            `outcome` ("accepted", "stale", "taken", "set", or the names of faults) and the round's `step`
            afterwards.
    """

    number: int
    kind: str
    dtype: str
    shape: list | None
    reduction: str
    steps: list

    @property
    def config(self):
        dims = ["None"] if self.shape is None else ["?" if dim is None else str(dim) for dim in self.shape]
        return f"{self.kind}-{self.dtype}-[{'x'.join(dims)}]-{self.reduction}"


def to_plain(array):
    """Return an array of floats as plain data: its shape and its bits, little-endian, in hexadecimal."""
    array = np.asarray(array)
    return {"shape": list(array.shape), "bits": array.astype(array.dtype.newbyteorder("<")).tobytes().hex()}


def from_plain(dtype, plain):
    """Return the array that `to_plain` was given."""
    little = np.dtype(dtype).newbyteorder("<")
    return np.frombuffer(bytes.fromhex(plain["bits"]), little).reshape(plain["shape"]).astype(dtype)
