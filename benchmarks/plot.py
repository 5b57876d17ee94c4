"""The picture of the shapes: how many times longer the others take than we do."""

from __future__ import annotations

from typing import Any


def draw(shapes: dict[str, Any], path: str) -> str:
    """Draw the ratios to ours, copying, and return a line that says what was done."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        return f"{path} was not drawn: matplotlib is not installed"
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "gradquorum"  # the same file for the same figures
    from matplotlib import pyplot

    names = list(next(iter(shapes.values()))["times_ours_copying"])
    figure, axes = pyplot.subplots(figsize=(10, 4.5), layout="constrained")
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        ratios = [case["times_ours_copying"][name] for case in shapes.values()]
        axes.bar([x + (i - (len(names) - 1) / 2) * width for x in range(len(shapes))], ratios, width, label=name)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_yscale("log")
    axes.set_xticks(range(len(shapes)), list(shapes))
    axes.set_ylabel("time / gradquorum's")
    axes.set_title("Apply all gradients of a round, take once")
    figure.legend(loc="outside lower center", ncols=len(names), fontsize="small", frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)
    return f"drawn: {path}"
