"""Figures of the report: acceptance length, loss, position rates, latency.

Equal tables give equal files: no dates, fixed ids in the SVG.
"""

from collections import defaultdict
from operator import itemgetter
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import MaxNLocator

from scripts.lib import store
from scripts.lib.statistics import MACRO, POOLED

GROUP = itemgetter("verifier", "algorithm", "strategy")
SMOOTH_POINTS = 400


def grouped(rows: list[dict], by=GROUP) -> dict[tuple, list[dict]]:
    """Return rows by group, in the order of their first appearance."""
    result = defaultdict(list)
    for row in rows:
        result[by(row)].append(row)
    return dict(result)


def last_macro(tables: dict) -> dict[tuple, dict]:
    """Return each group's macro row of its last epoch."""
    rows = [r for r in tables["acceptance"] if r["workload"] == MACRO]
    return {name: max(own, key=itemgetter("epoch")) for name, own in grouped(rows).items()}


def panels(names: list[tuple], share: bool = True, height: float = 3.6):
    """Return a figure and one axes per name, in rows of at most three.

    Args:
        names: titles as tuples.
        share: whether all panels have one vertical scale.
        height: of a row of panels, in inches.
    """
    columns = min(3, len(names))
    lines = -(-len(names) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(max(7.5, 5 * columns), height * lines), squeeze=False,
        sharey=share, layout="constrained",
    )  # fmt: skip
    for axis in axes.flat[len(names) :]:
        axis.set_axis_off()
    for axis, name in zip(axes.flat, names, strict=False):
        axis.set_title(" / ".join(map(str, name)), fontsize=10)
        axis.set_axisbelow(True)
        axis.grid(axis="y", alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes.flat[: len(names)])


def nan(value) -> float:
    """Return a number that matplotlib leaves out when there is none."""
    return np.nan if value is None else value


def draw_acceptance(tables: dict):
    """Draw acceptance length against epoch; None without rows."""
    groups = grouped([r for r in tables["acceptance"] if r["workload"] != POOLED])
    if not groups:
        return None
    figure, axes = panels(list(groups))
    for axis, rows in zip(axes, groups.values(), strict=True):
        for workload, own in grouped(rows, itemgetter("workload")).items():
            own.sort(key=itemgetter("epoch"))
            epochs, macro = [r["epoch"] for r in own], workload == MACRO
            axis.plot(
                epochs, [nan(r["acceptance_length"]) for r in own], marker="o", label=workload,
                color="black" if macro else None, linewidth=2.5 if macro else 1.1,
                markersize=5 if macro else 3, zorder=3 if macro else 2,
            )  # fmt: skip
            if macro:
                low, high = ([nan(r[c]) for r in own] for c in ("ci_low", "ci_high"))
                axis.fill_between(epochs, low, high, color="black", alpha=0.15, linewidth=0)
                if len(own) == 1:  # a band has no width at one epoch
                    axis.vlines(epochs, low, high, color="black", alpha=0.4, linewidth=4)
        axis.set(xlabel="epoch", ylabel="acceptance length")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        epochs = [r["epoch"] for r in rows]
        axis.set_xlim(min(epochs) - 0.3, max(epochs) + 0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", fontsize=9)
    return figure


def draw_losses(tables: dict, losses: dict[str, list[tuple[int, float]]]):
    """Draw step losses and validation losses (by the parts' keys); None without rows."""
    groups = grouped(tables["training"])
    if not groups:
        return None
    figure, axes = panels(list(groups), share=False)
    for axis, rows in zip(axes, groups.values(), strict=True):
        rows.sort(key=itemgetter("epoch"))
        steps, values = np.array([p for r in rows for p in losses[r["key"]]]).T
        chunks = np.array_split(np.arange(len(steps)), min(len(steps), SMOOTH_POINTS // 10))
        if len(steps) <= 10 * SMOOTH_POINTS:
            axis.plot(steps, values, color="0.8", linewidth=0.7, label="training, each step")
        axis.plot([steps[c].mean() for c in chunks], [values[c].mean() for c in chunks],
                  color="tab:blue", label="training, mean")  # fmt: skip
        ends = [losses[r["key"]][-1][0] for r in rows]
        held_out = [nan(r["validation_loss"]) for r in rows]
        axis.plot(ends, held_out, "o-", color="tab:red", label="validation, after each epoch")
        # The first steps of an untrained draft would flatten all that follows.
        axis.set_ylim(0, 1.15 * np.nanmax([np.quantile(values, 0.98), *held_out]))
        axis.set(xlabel="step", ylabel="loss (sum over positions)")
        axis.legend(fontsize=9)
    return figure


def bars(axis, series: dict[str, list], labels: list[str]) -> None:
    """Draw grouped bars: one colour per series, one group per label."""
    width = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        offset = (number - (len(series) - 1) / 2) * width
        drawn = axis.bar(np.arange(len(labels)) + offset, values, width * 0.95, label=name)
        axis.bar_label(drawn, fmt=lambda v: f"{v:.3g}" if np.isfinite(v) else "", fontsize=8)
    axis.set_xticks(np.arange(len(labels)), labels)
    if len(series) > 1:
        axis.margins(y=0.15)
        axis.legend(fontsize=9)


def draw_positions(tables: dict):
    """Draw the macro position rates of the last epochs; None without rows."""
    last = last_macro(tables)
    if not last:
        return None
    verifiers = grouped(list(last.values()), itemgetter("verifier"))
    figure, axes = panels([(v,) for v in verifiers])
    for axis, rows in zip(axes, verifiers.values(), strict=True):
        positions = range(1, max(r["k"] for r in rows) + 1)
        series = {
            f"{r['algorithm']} / {r['strategy']}, epoch {r['epoch']}":
            [nan(r.get(f"position_{i}")) for i in positions] for r in rows
        }  # fmt: skip
        bars(axis, series, [str(i) for i in positions])
        axis.set(xlabel="position in the draft", ylabel="share of drafts accepted up to here")
        axis.legend(fontsize=9)
    return figure


def draw_latency(tables: dict):
    """Draw inter-token latency with and without speculator; None without rows."""
    places = grouped(tables["latency"], itemgetter("verifier", "workload", "hardware"))
    if not places:
        return None
    figure, axes = panels(list(places))
    for axis, rows in zip(axes, places.values(), strict=True):
        concurrencies = sorted({r["concurrency"] for r in rows})
        series = {}
        for name, own in grouped(rows, itemgetter("algorithm", "strategy", "epoch")).items():
            found = {r["concurrency"]: nan(r["itl_ms"]) for r in own}
            label = f"{name[0]} / {name[1]}, epoch {name[2]}" if name[2] else "without speculator"
            series[label] = [found.get(c, np.nan) for c in concurrencies]
        bars(axis, series, [str(c) for c in concurrencies])
        axis.set(xlabel="requests in flight", ylabel="ms per output token (median)")
    return figure


def save(figures: dict, folder: Path) -> dict[str, bytes]:
    """Write each figure as PNG and SVG; return the PNG files' content by name."""
    plt.rcParams["svg.hashsalt"] = "speculators"  # else the ids in an SVG are random
    formats, result = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}, {}
    for name, figure in figures.items():
        for suffix, metadata in formats.items():
            path = folder / f"{name}.{suffix}"
            if figure is None:  # a study without latency must not show an old one's
                path.unlink(missing_ok=True)
                continue
            with store.replacing(path) as temporary:
                figure.savefig(temporary, format=suffix, dpi=150, metadata=metadata)
            if suffix == "png":
                result[name] = path.read_bytes()
        if figure is not None:
            plt.close(figure)
    return result
