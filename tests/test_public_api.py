"""The surface: names, signatures, docstrings, what an import costs and loads, and the README's example."""

import inspect
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gradquorum as gq

ROOT = Path(__file__).parent.parent

NAMES = [
    "SparseConditionalAccumulator",
    "ConditionalAccumulator",
    "ConditionalAccumulatorBase",
    "AccumulatorGroup",
    "SparseSpec",
    "DenseSpec",
    "IndexedSlices",
    "SparseGradient",
    "ApplyReceipt",
    "ApplyStatus",
    "GradQuorumError",
    "InvalidArgumentError",
    "InvalidDTypeError",
    "DeadlineExceededError",
    "CancelledError",
    "ClosedError",
    "ResourceExhaustedError",
    "UnavailableError",
    "StaleGradientWarning",
    "shared_table",
    "Window",
    "Weighted",
    "Defer",
    "SyncReplicas",
    "engine_name",
    "Server",
    "connect",
    "attach",
    "__version__",
]

OPTIONS = """target=None, order='arrival', compact=True, accumulate_dtype=None, on_nonfinite='keep',
    expected_workers=None, max_per_worker=None, max_bytes=None, on_full='raise', staleness='strict',
    num_threads=None, engine=None"""
TAKE = "self, num_required, name=None, *, timeout=None, exact=False"
MARKS = "worker=None, sequence=None, weight=1.0, copy=True, timeout=None"

SIGNATURES = {
    "Server": "address=None, *, authkey=None, max_bytes=None, checkpoint=None, checkpoint_every=30.0",
    "Server.close": "self",
    "connect": "address, authkey=None",
    "attach": "shared_name, target=None",
    "SparseConditionalAccumulator": "dtype, shape=None, shared_name=None, name='sparse_conditional_accumulator',"
    f" reduction_type='MEAN', *, {OPTIONS}",
    "ConditionalAccumulator": "dtype, shape=None, shared_name=None, name='conditional_accumulator',"
    f" reduction_type='MEAN', *, {OPTIONS}",
    "AccumulatorGroup": f"members, shared_name=None, name='accumulator_group', *, {OPTIONS}",
    "SparseConditionalAccumulator.apply_grad": "self, grad_indices, grad_values, grad_shape=None, local_step=0,"
    f" name=None, *, {MARKS}",
    "SparseConditionalAccumulator.apply_indexed_slices_grad": f"self, grad, local_step=0, name=None, *, {MARKS}",
    "ConditionalAccumulator.apply_grad": f"self, grad, local_step=0, name=None, *, {MARKS}",
    "AccumulatorGroup.apply": f"self, gradients, local_step=0, *, {MARKS}",
    "AccumulatorGroup.take": "self, num_required, *, timeout=None, exact=False",
    "SparseConditionalAccumulator.take_grad": TAKE,
    "SparseConditionalAccumulator.take_indexed_slices_grad": TAKE,
    "ConditionalAccumulator.take_grad": TAKE,
}
SHARED = {
    "num_accumulated": "self, name=None",
    "set_global_step": "self, new_global_step, name=None",
    "publish": "self, step=None",
    "wait_published": "self, step, *, timeout=None",
    "worker": "self, name",
    "last_sequence": "self, worker",
    "discard": "self",
    "close": "self, for_all=False",
    "rounds": "self, num_required, *, timeout=None",
    "state_dict": "self",
    "load_state_dict": "self, state",
    "save": "self, path",
    "load": "self, path",
    "observe_arrivals": "self, num_rounds=256",
    "arrivals": "self",
    "suggest_num_required": "self, *, gain=1.0",
}
CLASSES = ["SparseConditionalAccumulator", "ConditionalAccumulator", "AccumulatorGroup"]
SIGNATURES |= {f"{name}.{method}": text for name in CLASSES for method, text in SHARED.items()}
PROPERTIES = [
    "name", "global_step", "published_step", "num_undelivered", "num_deferred", "num_workers", "engine", "closed",
]  # fmt: skip


def normal(signature):
    """Return a signature without annotations, as text."""
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(inspect.Signature(parameters))


def find(path):
    found = gq
    for part in path.split("."):
        found = getattr(found, part)
    return found


def test_all_has_the_public_names():
    assert set(NAMES) <= set(gq.__all__)
    assert sorted(gq.__all__, key=str) == sorted(set(gq.__all__), key=str)
    for name in gq.__all__:
        getattr(gq, name)


def test_all_has_nothing_undocumented_beside_them():
    assert set(gq.__all__) - set(NAMES) <= {"GroupGradient"}


@pytest.mark.parametrize("path", SIGNATURES)
def test_signature_is_exactly_the_specified_one(path):
    expected = "(" + " ".join(SIGNATURES[path].split()) + ")"
    assert normal(inspect.signature(find(path))) == expected


@pytest.mark.parametrize("name", CLASSES)
def test_take_in_the_background_has_the_arguments_of_a_take(name):
    kind = getattr(gq, name)
    for method in ("submit_take", "take_async" if kind is gq.AccumulatorGroup else "take_grad_async"):
        parameters = inspect.signature(getattr(kind, method)).parameters
        assert list(parameters)[:2] == ["self", "num_required"]
        for option, default in (("timeout", None), ("exact", False)):
            assert parameters[option].kind is inspect.Parameter.KEYWORD_ONLY
            assert parameters[option].default is default


@pytest.mark.parametrize("name", CLASSES)
def test_properties_are_read_only(name):
    names = PROPERTIES + ([] if name == "AccumulatorGroup" else ["dtype", "shape", "reduction_type"])
    for attribute in names:
        found = inspect.getattr_static(getattr(gq, name), attribute)
        assert isinstance(found, property)
        assert found.fset is None


@pytest.mark.parametrize(("spec", "reduction"), [("SparseSpec", "MEAN"), ("DenseSpec", "MEAN")])
def test_specs_take_dtype_shape_and_reduction(spec, reduction):
    parameters = inspect.signature(getattr(gq, spec)).parameters
    assert list(parameters)[:3] == ["dtype", "shape", "reduction_type"]
    assert parameters["reduction_type"].default == reduction


def public_objects():
    for name in gq.__all__:
        found = getattr(gq, name)
        if not inspect.isclass(found):
            continue
        yield name, found
        for attribute, member in inspect.getmembers(found):
            if attribute.startswith("_") or not (inspect.isroutine(member) or isinstance(member, property)):
                continue
            owner = next(c for c in found.__mro__ if attribute in vars(c))
            if owner.__module__.startswith("gradquorum"):
                yield f"{name}.{attribute}", member


OBJECTS = dict(public_objects())


@pytest.mark.parametrize("path", OBJECTS)
def test_public_object_has_a_docstring_of_one_sentence_first(path):
    documentation = inspect.getdoc(OBJECTS[path])
    assert documentation
    assert documentation.split("\n\n")[0].rstrip()[-1] in ".:"


SHOWN = {
    "Server": ["accumulator", "address", "close", "group"],
    "SyncReplicas": ["close", "closed", "group", "params", "run", "worker"],
}


@pytest.mark.parametrize("name", SHOWN)
def test_class_shows_what_is_for_its_users_and_nothing_else(name):
    assert [attribute for attribute in dir(getattr(gq, name)) if not attribute.startswith("_")] == SHOWN[name]


DOCUMENTED = {
    "apply_grad": ["Args:", "Returns:", "Raises:"],
    "apply_indexed_slices_grad": ["Args:", "Raises:"],
    "apply": ["Args:", "Raises:"],
    "take_grad": ["Args:", "Returns:", "Raises:"],
    "take": ["Args:", "Returns:", "Raises:"],
    "take_indexed_slices_grad": ["Raises:"],
    "set_global_step": ["Raises:"],
    "wait_published": ["Raises:"],
    "discard": ["Raises:"],
    "close": ["Returns:"],
}


@pytest.mark.parametrize("name", CLASSES)
def test_methods_document_what_they_return_and_raise(name):
    for method, sections in DOCUMENTED.items():
        if hasattr(getattr(gq, name), method):
            documentation = inspect.getdoc(getattr(getattr(gq, name), method))
            refers = re.search(r"(Arguments|errors|options)[^.]*`\w+", documentation)
            for section in sections:
                assert section in documentation or refers, f"{name}.{method} lacks {section}"


def test_classes_document_their_arguments_and_threads():
    for name in CLASSES:
        documentation = inspect.getdoc(getattr(gq, name))
        assert "Args:" in documentation or "of `SparseConditionalAccumulator`" in documentation
        assert "Example:" in documentation


def run_python(code, *options):
    done = subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_no_framework_and_nothing_heavy():
    # What it costs in milliseconds is measured by the benchmarks.
    code = (
        "import json, sys, numpy; own = {*sys.modules}; import gradquorum; print(json.dumps([*{*sys.modules} - own]))"
    )
    loaded = {name.split(".")[0] for name in json.loads(run_python(code))}
    heavy = {
        "torch",
        "tensorflow",
        "jax",
        "ray",
        "ml_dtypes",
        "asyncio",
        "inspect",
        "dataclasses",
        "typing_extensions",
        "msgspec",
        "safetensors",
        "socket",
        "click",
        "rich",
        "multiprocessing",
        "hypothesis",
    }
    assert not loaded & heavy


def test_import_is_quiet_and_warns_of_nothing():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "import gradquorum"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_import_starts_no_thread():
    assert run_python("import threading, gradquorum; print(threading.active_count())").strip() == "1"


def test_version_and_engine_name():
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", gq.__version__)
    assert gq.engine_name in ("native", "reference")


def readme_example():
    """Return the first Python block of the README and the block of output that follows it."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    for (language, code), (following, output) in itertools.pairwise(blocks):
        if language == "python" and following in ("", "text", "console", "output"):
            return code, output
    raise AssertionError("the README has no Python block followed by its output")


def test_readme_example_prints_what_it_says():
    code, output = readme_example()
    assert run_python(code, "-W", "error::UserWarning").split() == output.split()
    assert len([line for line in code.splitlines() if line.strip()]) <= 25
    assert "published_step" in code or "begin()" in code
    assert "rounds(" in code


def test_dir_lists_what_is_public_and_nothing_else():
    assert set(dir(gq)) == {*gq.__all__, "jax", "tensorflow", "torch"}
