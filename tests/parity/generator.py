"""Random programs on which TensorFlow and this library must agree to the bit.

A program is a pure function of `(seed, number)`. The generator models the round, so that it knows what every
step must come to: a take is only asked for when it can be served (TensorFlow would wait for ever), and a
gradient with a fault is refused by both sides with the same words.

What is left out, because the two differ on purpose or TensorFlow cannot be asked (SEMANTICS 2 and 3):

- ids that are unsorted, repeated or negative; subnormal numbers;
- values of another dtype, and a `local_step` of several entries: TensorFlow's process dies;
- a `local_step` of one entry where nothing else is wrong: TensorFlow reports it and counts the gradient;
- stale gradients with a fault: TensorFlow does not look at them;
- values of shape `(0,)` where rows are not scalar, and -1 in `grad_shape` where the dim is declared:
  TensorFlow refuses both;
- a `grad_shape` that contradicts the values or the ids where no shape is declared: TensorFlow ignores it;
- other than scalars in a dense accumulator of shape `()`: TensorFlow refuses them.

`test_live_tensorflow.py` shows these side by side, but for those that would end the process.
"""

import numpy as np

from tests.parity.programs import Program, to_plain

MAX_ID = 2**63 - 1

SPARSE_SHAPES = [
    None, [], [None], [None, 2], [5], [5, 2], [7, None], [2, None], [None, None], [6, 2, 3], [None, 2, 2],
    [5, None, 3], [2**61, 3],
]  # fmt: skip
DENSE_SHAPES = [None, [], [3], [None], [2, 3], [None, 3], [2, None], [2, 1, 2]]

SPARSE_CONFIGS, DENSE_CONFIGS = (
    [(kind, dtype, shape, reduction) for shape in shapes for dtype in ("float32", "float64")
     for reduction in ("MEAN", "SUM")]
    for kind, shapes in (("sparse", SPARSE_SHAPES), ("dense", DENSE_SHAPES))
)  # fmt: skip

FLOORS = {"float32": 1e-27, "float64": 1e-280}
"""Magnitudes from which no sum, difference or mean of ours is subnormal."""


def generate(seed, number):
    """Return program `number` of `seed`: five sparse ones, then a dense one, through all configurations."""
    turn, place = divmod(number, 6)
    if place == 5:
        config = DENSE_CONFIGS[turn % len(DENSE_CONFIGS)]
        return _DenseWriter(np.random.default_rng([seed, number]), number, config).write()
    config = SPARSE_CONFIGS[(5 * turn + place) % len(SPARSE_CONFIGS)]
    return _SparseWriter(np.random.default_rng([seed, number]), number, config).write()


class _Writer:
    """Writes one program, and models the round as far as the choice of steps needs it."""

    def __init__(self, rng, number, config):
        kind, dtype, self.shape, reduction = config
        self.rng = rng
        self.dtype = np.dtype(dtype)
        self.program = Program(number, kind, dtype, self.shape, reduction, [])
        self.palette = self.pick(["rough", "nice", "wide", "special", "mixed"])
        self.global_step = 0
        self.count = 0
        self.round_shape = None
        """What gradients of this round must look like, once there is one."""

    def pick(self, options, p=None):
        return options[int(self.rng.choice(len(options), p=p))]

    def chance(self, probability):
        return bool(self.rng.random() < probability)

    def integer(self, low, high):
        """Return an integer from low to high, both included."""
        return int(self.rng.integers(low, high, endpoint=True))

    def write(self):
        writers = [self.add_apply, self.add_stale, self.add_future, self.add_fault, self.add_take,
                   self.add_bad_take, self.add_set_step]  # fmt: skip
        for _ in range(self.integer(6, 14)):
            self.pick(writers, p=[0.46, 0.1, 0.06, 0.18, 0.12, 0.03, 0.05])()
        if self.count:
            self.add_take()
        return self.program

    def add(self, op, outcome, **arguments):
        self.program.steps.append({"op": op, **arguments, "outcome": outcome, "step": self.global_step})

    def accept(self, gradient, local_step):
        self.count += 1
        self.note(gradient)
        self.add("apply", "accepted", **gradient, local_step=local_step)

    def add_apply(self):
        self.accept(self.gradient(), self.global_step)

    def add_future(self):
        self.accept(self.gradient(), self.global_step + self.pick([1, 2, 1000, 2**40]))

    def add_stale(self):
        # A stale gradient need not look like those of the round: only what is declared binds it.
        kept, self.round_shape = self.round_shape, None if self.chance(0.5) else self.round_shape
        gradient = self.gradient()
        self.round_shape = kept
        self.add("apply", "stale", **gradient, local_step=self.global_step - self.pick([1, 1, 2, 2**41]))

    def add_fault(self):
        gradient = {**self.gradient(filled=True), "local_step": self.global_step + self.pick([0, 0, 3])}
        chosen = self.choose_faults()
        if not chosen:
            return
        for _, inject in chosen:
            inject(gradient)
        # Several faults at once: which one is reported is recorded, not predicted.
        self.add("apply", "+".join(sorted(name for name, _ in chosen)), **gradient)

    def choose_faults(self):
        """Return one to three faults that do not touch each other, as (name, what injects it)."""
        faults = [self.pick(group) for group in self.faults() if group]
        places = [int(i) for i in self.rng.permutation(len(faults))][: self.pick([1, 1, 1, 2, 3])]
        if places == [0]:
            # A wrong local_step and nothing else: TensorFlow reports it and counts the gradient.
            places = [0, 1] if self.chance(0.3) else [1]
        return [faults[i] for i in sorted(places) if i < len(faults)] if len(faults) > 1 else []

    def fault_in_step(self, gradient):
        gradient["local_step"] = self.pick([[gradient["local_step"]], [[gradient["local_step"]]]])

    def add_take(self):
        if not self.count:
            return
        num_required = self.pick([self.count, self.integer(1, self.count)])
        self.global_step += 1
        self.count = 0
        self.round_shape = None
        self.note(None)
        self.add("take", "taken", num_required=num_required)

    def add_bad_take(self):
        self.add("take", "num_required", num_required=self.pick([0, -1, -7]))

    def add_set_step(self):
        here = self.global_step
        self.global_step = self.pick([here + 1, here + 5, here - 1, here - 4, 0, -3, 2**45])
        self.add("set_step", "set")

    def numbers(self, shape):
        """Return an array to the taste of the program, in plain data."""
        palette = self.pick(["rough", "nice", "wide", "special"]) if self.palette == "mixed" else self.palette
        limits = np.finfo(self.dtype)
        floor = FLOORS[self.dtype.name]
        if palette == "nice":
            values = self.rng.integers(-20, 20, shape) / 4
        elif palette == "special":
            special = [0.0, -0.0, -0.0, 1.0, -1.0, 1 / 3, np.inf, -np.inf, np.nan, limits.max, -limits.max,
                       floor, -floor, 1e30, -1e30]  # fmt: skip
            values = self.rng.choice(special, shape)
        else:
            highest = 35 if limits.bits == 32 else 250
            exponents = 0 if palette == "rough" else self.rng.uniform(-25, highest, shape)
            values = self.rng.standard_normal(shape) * 10.0**exponents
        values = np.asarray(values)
        values = np.where((values != 0) & (np.abs(values) < floor), np.copysign(floor, values), values)
        return to_plain(values.astype(self.dtype))


class _DenseWriter(_Writer):
    SHAPES = ((), (1,), (3,), (4,), (2, 3), (2, 2), (0, 3), (2, 1, 2))

    def fits(self, shape, wanted):
        if len(shape) != len(wanted):
            return False
        return all(w in (None, dim) for dim, w in zip(shape, wanted, strict=True))

    def allowed(self):
        """What binds the next gradient: the round if it holds one, else what is declared."""
        return self.round_shape if self.round_shape is not None else self.shape

    def gradient(self, filled=False):
        wanted = self.allowed()
        shapes = [shape for shape in self.SHAPES if wanted is None or self.fits(shape, wanted)]
        return {"values": self.numbers(self.pick(shapes))}

    def note(self, gradient):
        if gradient is not None:
            self.round_shape = gradient["values"]["shape"]

    def faults(self):
        binds = self.round_shape is not None or self.shape  # [] binds nothing here, in TensorFlow it means scalars
        shape_faults = [("shape", self.fault_in_shape)] if binds else []
        return [[("local_step", self.fault_in_step)], shape_faults]

    def fault_in_shape(self, gradient):
        gradient["values"] = self.numbers(
            self.pick([shape for shape in self.SHAPES if not self.fits(shape, self.allowed())])
        )


class _SparseWriter(_Writer):
    ROWS = ((), (1,), (2,), (3,), (2, 2), (2, 3), (1, 3), (2, 2, 2))

    def __init__(self, *args):
        super().__init__(*args)
        self.declared = self.shape or []
        self.firm = False
        """Whether the round holds a gradient that fixes the rows for us too: values of shape (0,) do not."""
        self.large_ids = self.chance(0.2)

    def fits(self, row):
        """Whether rows like this are right by what is declared."""
        wanted = self.declared[1:]
        return len(row) >= len(wanted) and all(w in (None, dim) for w, dim in zip(wanted, row, strict=False))

    def row(self):
        if self.round_shape is not None:
            return self.round_shape
        return self.pick([row for row in self.ROWS if self.fits(row)])

    def ids(self, count):
        limit = self.declared[0] if self.declared and self.declared[0] is not None else MAX_ID + 1
        if limit > 100 and not self.large_ids:
            limit = self.pick([4, 12])
        if limit <= 100:
            return sorted(int(i) for i in self.rng.permutation(limit)[:count])
        near = [0, 1, 2**31 - 1, 2**31, 2**32, 2**40, 2**40 + 1, limit - 2, limit - 1]
        return sorted(near[int(i)] for i in self.rng.permutation(len(near))[:count])

    def gradient(self, filled=False):
        """Return a gradient; if `filled`, then not one of values of shape (0,), in which we see no fault."""
        row = self.row()
        ids = self.ids(0 if self.chance(0.08) and not (filled and not row) else self.integer(1, 5))
        gradient = {"ids": ids, "values": self.numbers((len(ids), *row)), "grad_shape": None}
        if self.chance(0.3):
            gradient["grad_shape"] = self.grad_shape(ids, row)
        return gradient

    def grad_shape(self, ids, row):
        """Return a `grad_shape` without a fault: also with unknown dims, short or long where it may be."""
        highest = min(ids[-1] + self.integer(1, 3), MAX_ID) if ids else self.integer(0, 3)
        full = [highest if highest > (ids[-1] if ids else -1) else -1, *row]
        for i, dim in enumerate(self.declared):
            if dim is not None:
                full[i] = dim
            elif self.chance(0.3):
                full[i] = -1
        if not self.declared and self.chance(0.3):
            full[self.integer(0, len(full) - 1)] = -1
        length = self.integer(len(self.declared), len(full) + 1)
        return [*full, self.integer(1, 9)][:length]

    def note(self, gradient):
        if gradient is None:
            self.firm = False
        else:
            self.round_shape = gradient["values"]["shape"][1:]
            self.firm = self.firm or gradient["values"]["shape"] != [0]

    def faults(self):
        known = [i for i, dim in enumerate(self.declared) if dim is not None]
        shape_faults = []
        if self.declared:
            shape_faults.append(("grad_shape rank", self.fault_in_grad_shape_rank))
        if known:
            shape_faults.append(("grad_shape dim", self.fault_in_grad_shape_dim))
        id_faults = [("ids rank", self.fault_in_ids_rank)]
        if known[:1] == [0]:
            id_faults.append(("id", self.fault_in_id))
        value_faults = [("values rank 0", self.fault_in_values_rank), ("length", self.fault_in_length)]
        if self.wrong_rows():
            value_faults += [("row", self.fault_in_row)] * 3
        return [[("local_step", self.fault_in_step)], shape_faults, id_faults, value_faults]

    def fault_in_grad_shape_rank(self, gradient):
        full = self.grad_shape(gradient["ids"], self.row())
        gradient["grad_shape"] = full[: self.integer(0, len(self.declared) - 1)]

    def fault_in_grad_shape_dim(self, gradient):
        shape = self.grad_shape(gradient["ids"], self.row())
        known = [i for i, dim in enumerate(self.declared) if dim is not None]
        for i in {self.pick(known), self.pick(known)}:
            shape[i] = self.declared[i] + self.integer(1, 3)
        gradient["grad_shape"] = shape

    def fault_in_ids_rank(self, gradient):
        gradient["ids"] = self.pick([[gradient["ids"]], [[i] for i in gradient["ids"]] or 3, 3])

    def fault_in_id(self, gradient):
        ids = gradient["ids"]
        rows = self.declared[0]
        bad = sorted({rows + self.pick([0, 0, 1, 2**33]), rows + self.pick([0, 7])})
        if ids:
            ids = [*ids, *bad][-len(ids) :]
        else:
            ids, gradient["values"] = bad, self.numbers((len(bad), *self.row()))
        gradient["ids"] = ids

    def fault_in_values_rank(self, gradient):
        gradient["values"] = self.numbers(())

    def fault_in_length(self, gradient):
        num_rows, *row = gradient["values"]["shape"]
        gradient["values"] = self.numbers((self.pick([n for n in (0, 1, 2, 6) if n != num_rows]), *row))

    def wrong_rows(self):
        """Rows that both sides refuse: unlike those of the round, or unlike what is declared."""
        if self.round_shape is None:
            return [row for row in self.ROWS if not self.fits(row)]
        return [row for row in self.ROWS if list(row) != list(self.round_shape)] if self.firm else []

    def fault_in_row(self, gradient):
        row = self.pick(self.wrong_rows())
        num_rows = gradient["values"]["shape"][0]
        if not row and not num_rows:  # values of shape (0,) would be right
            gradient["ids"], num_rows = [0], 1
        gradient["values"] = self.numbers((num_rows, *row))
