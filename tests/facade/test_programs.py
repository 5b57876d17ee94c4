"""Random programs give what TensorFlow's own class gives, in all three modes, to the bit."""

import numpy as np
import pytest

from tests.facade.adapters import EagerFacade, FacadeGraphs, FunctionFacade, ServerGraphs, arguments_of, entry_of
from tests.parity.conftest import CHUNK
from tests.parity.replay import differences

SEED = 11
MODES = (("eager", 156), ("function", 48), ("graph", 156), ("function over a server", 12), ("graph over a server", 48))
"""With the number of programs, each in several configurations."""

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::gradquorum.StaleGradientWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def adapters(tf, gqtf, server):
    """For each mode, what makes an adapter of a program."""
    facade_graphs, server_graphs = FacadeGraphs(tf, gqtf), ServerGraphs(tf, gqtf, server.address)
    return {
        "eager": lambda program: EagerFacade(tf, gqtf, program),
        "function": lambda program: FunctionFacade(tf, gqtf, program),
        "graph": facade_graphs.adapter,
        "function over a server": lambda program: FunctionFacade(tf, gqtf, program, server.address),
        "graph over a server": server_graphs.adapter,
    }


@pytest.mark.parametrize(
    ("mode", "start"),
    [(mode, start) for mode, count in MODES
     for start in range(0, count, CHUNK)],
)  # fmt: skip
def test_programs_in_each_mode_give_the_same_bits(mode, start, live, adapters):
    live.check_chunk(start, adapters[mode])


@pytest.mark.parametrize("number", range(0, 24, 2))
def test_whole_program_in_one_function_runs_in_the_order_it_is_written(number, tf, gqtf, live):
    """No control dependency is added by hand, and a second trace goes on with the same accumulator."""
    program, expected = live.program(number)
    good = [i for i, step in enumerate(program.steps) if "error" not in expected[i]]

    with EagerFacade(tf, gqtf, program) as eager:
        acc = eager.acc

        def whole(_):
            results = []
            for i in good:
                step, taken = program.steps[i], ()
                if step["op"] == "apply":
                    acc.apply_grad(*arguments_of(program, step), local_step=step["local_step"])
                elif step["op"] == "take":
                    taken = acc.take_grad(step["num_required"])
                else:
                    acc.set_global_step(step["step"])
                results.append((taken, acc.num_accumulated()))
            return results

        function = tf.function(whole)
        for again in (np.zeros(1), np.zeros(2)):  # another shape, so another trace
            for i, (taken, count) in zip(good, function(again), strict=True):
                assert int(count) == expected[i]["count"], program.steps[i]
                if program.steps[i]["op"] == "take":
                    theirs = {**expected[i], "step": 0}
                    ours = {**entry_of(program, taken), "count": int(count), "step": 0}
                    one = type(program)(0, program.kind, program.dtype, program.shape, program.reduction, [])
                    one.steps = [{**program.steps[i], "step": 0}]
                    assert not list(differences(one, [theirs], [ours]))
            acc.set_global_step(0)
        assert function.experimental_get_tracing_count() == 2
