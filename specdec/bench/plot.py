"""A picture of the results: tokens per second by kind of prompt, a bar a method, with its spread.

A dash on a bar is where the prediction put it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..benchmark import PLAIN
from .measure import Result
from .runs import SPECDEC


def check_plot(file: Path) -> None:
    """Raise a ValueError unless `file` can be drawn: .png or .svg, and matplotlib installed."""
    if file.suffix not in (".png", ".svg"):
        raise ValueError(f"plot: expected a file .png or .svg, got {file}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ValueError("plot: needs a package that is missing: pip install matplotlib") from error


def draw(results: Sequence[Result], file: Path, title: str) -> None:
    """Write the picture; its kind is the file's suffix. ValueError as `check_plot`."""
    check_plot(file)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(r.prompt_kind for r in results))
    names = list(dict.fromkeys((r.engine, r.method) for r in results))
    plain = {
        r.prompt_kind: r.tokens_per_second.median
        for r in results
        if (r.engine, r.method) == (SPECDEC, PLAIN)
    }
    width = 0.8 / len(names)
    figure = Figure(figsize=(2.5 + 0.3 * len(names) * len(kinds), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for i, (engine, method) in enumerate(names):
        own = [r for r in results if (r.engine, r.method) == (engine, method)]
        at = [kinds.index(r.prompt_kind) - 0.4 + (i + 0.5) * width for r in own]
        speeds = [r.tokens_per_second for r in own]
        heights = [speed.median for speed in speeds]
        below = [speed.median - speed.low for speed in speeds]
        above = [speed.high - speed.median for speed in speeds]
        hatch = None if engine == SPECDEC else "///"
        axes.bar(
            at,
            heights,
            width,
            yerr=[below, above],
            hatch=hatch,
            label=f"{engine}: {method}",
            color=f"C{i % 10}",
            edgecolor="white",
            error_kw={"elinewidth": 0.8},
        )
        for x, r in zip(at, own, strict=True):
            if r.prediction is not None:
                predicted = r.prediction.speedup * plain[r.prompt_kind]
                axes.hlines(predicted, x - width / 2, x + width / 2, color="black", linewidth=1.5)
    axes.set_xticks(range(len(kinds)), kinds)
    axes.set_ylabel("tokens per second, without the prefill")
    axes.set_title(title, fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", fontsize="small", frameon=False)
    figure.savefig(file, dpi=150)
