"""The picture of the shapes: how many times longer the others take than we do."""

from __future__ import annotations

from typing import Any

from benchmarks.bench_shapes import COPYTO


def draw(shapes: dict[str, Any], engine: str, path: str) -> str:
    """Draw the ratios to ours, copying, and return a line that says what was done."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return f"{path} was not drawn: matplotlib is not installed"
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "gradquorum"  # the same file for the same figures
    from matplotlib import pyplot

    ours = f"{engine} copy"
    names = [n for n in next(iter(shapes.values())) if n not in (ours, COPYTO, "moving the bytes")]
    figure, axes = pyplot.subplots(figsize=(10, 4.5), layout="constrained")
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        ratios = [case[name]["median_s"] / case[ours]["median_s"] for case in shapes.values()]
        axes.bar([x + (i - (len(names) - 1) / 2) * width for x in range(len(shapes))], ratios, width, label=name)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_yscale("log")
    axes.set_xticks(range(len(shapes)), list(shapes))
    axes.set_ylabel("time / gradquorum's")
    axes.set_title("Apply all gradients of a round, take once")
    figure.legend(loc="outside lower center", ncols=len(names), fontsize="small", frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)
    return f"drawn: {path}"
