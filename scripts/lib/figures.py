"""Figures of the report: strategies, epochs, loss, position rates, latency.

Equal tables give equal files: no dates, fixed ids in the SVG.
"""

from collections import Counter, defaultdict
from operator import itemgetter
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import MaxNLocator

from scripts.lib import store
from scripts.lib.results import equal_epochs, last_epochs, reference
from scripts.lib.statistics import MACRO, POOLED

GROUP = itemgetter("verifier", "algorithm", "strategy")
SMOOTH_POINTS = 400
LABELLED = 4  # more bars in a group than this leave no room for their numbers
# Eight colours that stay apart for the colour-blind (after Okabe and Ito); the next
# eight are the same with hatches.
COLOURS = (
    "#4d4d4d", "#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7", "#f0e442",
)  # fmt: skip
HATCHES = ("", "///", "...", "xx")


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


def styles(names: list[str]) -> dict[str, dict]:
    """Return colour and hatch of each series, the same in every panel that has it."""
    return {
        name: {"facecolor": COLOURS[i % len(COLOURS)], "edgecolor": "white", "linewidth": 0,
               "hatch": HATCHES[i // len(COLOURS) % len(HATCHES)]}
        for i, name in enumerate(dict.fromkeys(names))
    }  # fmt: skip


def strategy_styles(tables: dict) -> dict[str, dict]:
    """Return each strategy's style: the first colour is for what others are compared with."""
    plain = [reference(rows) for rows in last_epochs(tables["strategies"]).values()]
    names = [r["strategy"] for r in tables["acceptance"]]
    return styles([name for name in plain if name] + names)


def legend_below(figure, axes) -> None:
    """Put one legend of all panels' series under them, each series once."""
    found: dict = {}
    for axis in axes:
        handles, labels = axis.get_legend_handles_labels()
        found |= {n: h for n, h in zip(labels, handles, strict=True) if n not in found}
    # Names of any length: as many columns as fit the figure's width.
    widest = max((len(name) for name in found), default=1)
    fitting = max(1, int(figure.get_figwidth() * 12 / (widest + 8)))
    lines = -(-len(found) // fitting)
    figure.legend(list(found.values()), list(found), loc="outside lower center", fontsize=9,
                  ncols=max(1, -(-len(found) // max(1, lines))), frameon=False)  # fmt: skip


def panels(names: list[tuple], share: bool = True, height: float = 3.6, columns: int = 3):
    """Return a figure and one axes per name.

    Args:
        names: titles as tuples.
        share: whether all panels have one vertical scale.
        height: of a row of panels, in inches.
        columns: panels in a row, at most.
    """
    # Four in rows of three would leave a hole of two.
    columns = 2 if columns == 3 and len(names) == 4 else min(columns, len(names))
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
    """Draw acceptance length against epoch; None without anything to draw.

    Where some were measured at several epochs, or strategies are compared
    (`draw_strategies`), those measured once have no panel.
    """
    groups = grouped([r for r in tables["acceptance"] if r["workload"] != POOLED])
    several = {n: rows for n, rows in groups.items() if len({r["epoch"] for r in rows}) > 1}
    beside = Counter(name[:2] for name in groups)
    groups = several or {n: rows for n, rows in groups.items() if beside[n[:2]] == 1}
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
    legend_below(figure, axes)
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


def bars(
    axis, series: dict[str, list], labels: list[str], shown: dict[str, dict], errors=None,
    bottom: float = 0.0,
) -> None:  # fmt: skip
    """Draw grouped bars: one colour per series, one group per label.

    Args:
        axis: where to.
        series: name -> values, one per label, NaN for none.
        labels: names of the groups.
        shown: name -> colour and hatch (`styles`).
        errors: name -> [(low, high), ...], ends of intervals, or None.
        bottom: value that bars start from.
    """
    width = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        places = np.arange(len(labels)) + (number - (len(series) - 1) / 2) * width
        drawn = axis.bar(
            places, np.array(values) - bottom, width * 0.92, bottom, label=name, **shown[name]
        )
        if errors:
            low, high = np.array(errors[name], dtype=float).T
            axis.vlines(places, low, high, color="black", linewidth=1)
        elif len(series) <= LABELLED:
            axis.bar_label(drawn, fmt=lambda v: f"{v:.3g}" if np.isfinite(v) else "", fontsize=8)
    axis.set_xticks(np.arange(len(labels)), labels)
    axis.margins(y=0.15 if not errors and len(series) <= LABELLED else 0.05)


def after(rows: list[dict]) -> str:
    """Return the epoch of some rows as part of a title."""
    epochs = {r["epoch"] for r in rows}
    return f"after epoch {epochs.pop()}" if len(epochs) == 1 else "after the last epochs"


def draw_strategies(tables: dict):
    """Draw acceptance length by workload, a bar per strategy at an epoch that all have.

    None when no verifier and algorithm has two strategies.
    """
    rows = [r for r in tables["acceptance"] if r["workload"] != POOLED]
    workloads = [w for w in dict.fromkeys(r["workload"] for r in rows) if w != MACRO] + [MACRO]
    places = {}
    for name, macro in equal_epochs([r for r in rows if r["workload"] == MACRO]).items():
        if len(macro) > 1:
            places[*name, after(macro)] = {
                m["strategy"]: {r["workload"]: r for r in rows
                                if GROUP(r) == GROUP(m) and r["epoch"] == m["epoch"]}
                for m in macro
            }  # fmt: skip
    if not places:
        return None
    shown = strategy_styles(tables)
    figure, axes = panels(list(places), columns=1, height=3.2)
    figure.set_figwidth(max(8, 1.6 * len(workloads)))
    for axis, own in zip(axes, places.values(), strict=True):
        found = {s: [cells.get(w, {}) for w in workloads] for s, cells in own.items()}
        value = {s: [nan(r.get("acceptance_length")) for r in f] for s, f in found.items()}
        ends = {s: [(nan(r.get("ci_low")), nan(r.get("ci_high"))) for r in f]
                for s, f in found.items()}  # fmt: skip
        # A draft that never guesses right has 1, so that is where bars start.
        bars(axis, value, workloads, shown, ends, bottom=1.0)
        axis.axvline(len(workloads) - 1.5, color="0.7", linewidth=0.8)
        axis.get_xticklabels()[-1].set_fontweight("bold")
        axis.set(ylabel="acceptance length", xlim=(-0.55, len(workloads) - 0.45))
    legend_below(figure, axes)
    return figure


def hybrids(rows: list[dict]) -> dict[str, list[tuple[int, dict]]]:
    """Return start -> (own samples after the start, row) of what adds own data to it.

    A hybrid has relation "self" and a start that learned from another model. The start's
    own row, if it was benchmarked, has 0 samples.

    Args:
        rows: of strategies.csv, one verifier and algorithm.
    """
    places = {f"{r['strategy']}/epoch-{r['epoch']}": r for r in rows}
    result: dict[str, list[tuple[int, dict]]] = {}
    for row in next(iter(equal_epochs(rows).values()), []):
        start = places.get(row["start"])  # None: there is none, or it was not benchmarked
        if row["relation"] != "self" or not row["start"] or (start or {}).get("relation") == "self":
            continue
        line = result.setdefault(row["start"], [(0, start)] if start else [])
        line.append((row["own_samples"], row))
    return {name: sorted(line, key=itemgetter(0)) for name, line in result.items()}


def draw_own_samples(tables: dict):
    """Draw macro acceptance length against own samples of hybrids; None without one."""
    panel = grouped(tables["strategies"], itemgetter("verifier", "algorithm"))
    found = {name: hybrids(rows) for name, rows in panel.items()}
    found = {name: lines for name, lines in found.items() if lines}
    if not found:
        return None
    shown = styles(["self", *(start for lines in found.values() for start in lines)])
    figure, axes = panels(list(found))
    for axis, (name, lines) in zip(axes, found.items(), strict=True):
        for start, rows in lines.items():
            counts = [n for n, _ in rows]
            value, low, high = (
                [nan(r[c]) for _, r in rows] for c in (MACRO, "macro_ci_low", "macro_ci_high")
            )
            colour = shown[start]["facecolor"]
            axis.plot(counts, value, marker="o", color=colour, label=f"after {start}", zorder=3)
            axis.vlines(counts, low, high, color=colour, linewidth=1.5)
        equal = next(iter(equal_epochs(panel[name]).values()))
        for row in equal:
            if row["strategy"] == reference(equal) and row[MACRO] is not None:
                label = f"{row['strategy']}/epoch-{row['epoch']} ({row['own_samples']:,} samples)"
                axis.axhline(row[MACRO], color=COLOURS[0], linestyle="--", label=label)
                if row["macro_ci_low"] is not None:
                    ends = row["macro_ci_low"], row["macro_ci_high"]
                    axis.axhspan(*ends, color=COLOURS[0], alpha=0.12, linewidth=0)
        own = sorted({n for rows in lines.values() for n, _ in rows})
        above = [n for n in own if n]
        if above[-1] > 8 * above[0]:  # 1,000 and 100,000 on one axis, and 0
            axis.set_xscale("symlog", linthresh=above[0])
            axis.set_xlim(-0.4 * above[0], 1.6 * above[-1])
        axis.set_xticks(own, [f"{n:,}" for n in own])
        axis.minorticks_off()
        axis.set(xlabel="own samples after the start", ylabel="acceptance length, macro")
        axis.legend(fontsize=8)
    return figure


def draw_positions(tables: dict):
    """Draw the macro position rates of the last epochs; None without rows."""
    last = last_macro(tables)
    if not last:
        return None
    places = grouped(list(last.values()), itemgetter("verifier", "algorithm"))
    name = lambda row: f"{row['strategy']}, epoch {row['epoch']}"  # noqa: E731
    colours = strategy_styles(tables)
    shown = {name(r): colours[r["strategy"]] for r in last.values()}
    figure, axes = panels(list(places))
    for axis, rows in zip(axes, places.values(), strict=True):
        positions = range(1, max(r["k"] for r in rows) + 1)
        series = {name(r): [nan(r.get(f"position_{i}")) for i in positions] for r in rows}
        bars(axis, series, [str(i) for i in positions], shown)
        axis.set(xlabel="position in the draft", ylabel="share of drafts accepted up to here")
    legend_below(figure, axes)
    return figure


def draw_latency(tables: dict):
    """Draw inter-token latency with and without speculator; None without rows."""
    places = grouped(tables["latency"], itemgetter("verifier", "workload", "hardware"))
    if not places:
        return None
    labels = {
        (a, s, e): f"{a} / {s}, epoch {e}" if e else "without speculator"
        for a, s, e in map(itemgetter("algorithm", "strategy", "epoch"), tables["latency"])
    }
    shown = styles(list(labels.values()))
    figure, axes = panels(list(places))
    for axis, rows in zip(axes, places.values(), strict=True):
        concurrencies = sorted({r["concurrency"] for r in rows})
        series = {}
        for name, own in grouped(rows, itemgetter("algorithm", "strategy", "epoch")).items():
            found = {r["concurrency"]: nan(r["itl_ms"]) for r in own}
            series[labels[name]] = [found.get(c, np.nan) for c in concurrencies]
        bars(axis, series, [str(c) for c in concurrencies], shown)
        axis.set(xlabel="requests in flight", ylabel="ms per output token (median)")
    legend_below(figure, axes)
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
