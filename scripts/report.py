#!/usr/bin/env python3
"""Last stage, report: figures (PNG and SVG) and one HTML page from the tables.

The page carries its figures and style inside, so it opens offline and can be
mailed. Equal tables give equal files: no dates, fixed ids in the SVG.
"""

import base64
import csv
import sys
from collections import defaultdict
from operator import itemgetter
from pathlib import Path

import jinja2
import pyarrow.parquet as pq

sys.path[0] = str(Path(__file__).resolve().parents[1])
from scripts.lib import cli, figures, results, statistics, store
from scripts.lib.errors import UserError
from scripts.lib.figures import grouped, last_macro
from scripts.lib.statistics import MACRO, POOLED

TABLES = ("acceptance", "lossless", "latency", "training", "strategies", "epochs")
FEW = 4  # more speculators than this are folded away below the answers
CAPTIONS = {
    "acceptance_by_strategy": "Acceptance length by workload, a bar per strategy after the latest "
    "epoch at which all were measured, with 95 % intervals over prompts. These are wider than "
    "those of differences: the table above compares strategies prompt by prompt.",
    "acceptance_by_own_samples": "Acceptance length (macro) of speculators that start from a "
    "checkpoint trained on another model's responses and go on with some of the verifier's own. "
    "0 is that checkpoint, the dashed line a speculator trained on own responses only; bars and "
    "band are 95 % intervals.",
    "acceptance_by_epoch": "Acceptance length against training epoch: thin lines are workloads, "
    "the black line is their macro mean, its band the 95 % interval over prompts. A speculator "
    "that never guesses right has 1. Strategies measured after one epoch only are in "
    "acceptance_by_strategy.",
    "training_loss": "Training loss by step (grey: every step, blue: mean of neighbouring steps) "
    "and the loss on held-out conversations after each epoch.",
    "position_rates": "Share of drafts whose token at a position was accepted, last epoch, macro "
    "mean over workloads. A token counts only if all tokens before it were accepted.",
    "latency": "Median time between two output tokens with and without the speculator, by number "
    "of requests in flight. Lower is better.",
}

TEMPLATE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{{ study }}: speculators</title>
<style>
body{font:16px/1.5 system-ui,sans-serif;color:#1b1f24;max-width:70rem;margin:2rem auto}
body{padding:0 1rem}h1,h2{line-height:1.2}h2{margin-top:2.5rem;border-bottom:1px solid #d0d7de}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.85rem;margin:.5rem 0}
th,td{padding:.25rem .6rem;border-bottom:1px solid #d8dee4;white-space:nowrap;text-align:right}
th{background:#f6f8fa}td.text,th.text{text-align:left}tr.summary td{font-weight:600}
tr.flagged td{background:#fff3cd}figure{margin:1.5rem 0}img{max-width:100%}
figcaption,.note{color:#57606a;font-size:.9rem}.lead{font-size:1.1rem}dt{font-weight:600}
.notice{background:#fff3cd;border-left:.3rem solid #d4a72c;padding:.5rem 1rem;margin:.5rem 0}
</style></head><body>
{% macro cell(tag, column) %}<{{ tag }}{% if column in texts %} class="text"{% endif %}>
{%- endmacro %}
{% macro show(section) %}<h2>{{ section.title }}</h2>
{% if section.note %}<p class="note">{{ section.note }}</p>{% endif %}
{% for table in section.tables %}
<details{% if table.open %} open{% endif %}><summary>{{ table.title }}</summary>
<div class="scroll"><table>
<thead><tr>{% for c in table.columns %}{{ cell("th", c) }}{{ c }}</th>{% endfor %}</tr></thead>
<tbody>{% for row in table.rows %}
<tr class="{{ row.style }}">{% for c, v in row.cells %}{{ cell("td", c) }}{{ v }}</td>
{%- endfor %}</tr>{% endfor %}
</tbody></table></div></details>
{% endfor %}{% for f in section.figures %}
<figure><img alt="{{ f.name }}" src="data:image/png;base64,{{ f.data }}">
<figcaption>{{ f.caption }}</figcaption></figure>
{% endfor %}{% endmacro %}
<h1>{{ study }}: what the speculators give</h1>
{% for sentence in notices %}<p class="notice">{{ sentence }}</p>
{% endfor %}
{% for title, told in answers %}<p class="lead"><b>{{ title }}</b><br>
{%- for sentence in told %}{{ sentence }}<br>{% endfor %}</p>
{% endfor %}
<details{% if headline|length <= few %} open{% endif %}><summary>each speculator in words</summary>
{% for sentence in headline %}<p>{{ sentence }}</p>
{% endfor %}</details>
{% for section in sections if section.answer %}{{ show(section) }}{% endfor %}
<h2>What was run</h2>
<dl>{% for name, value in run %}<dt>{{ name }}</dt><dd>{{ value }}</dd>
{% endfor %}</dl>
{% for section in sections if not section.answer %}{{ show(section) }}{% endfor %}
<h2>Definitions</h2><dl>
<dt>acceptance length</dt><dd>1 + accepted / drafts: tokens that one step of the verifier emits,
its own (bonus) token included. Between 1 and k + 1.</dd>
<dt>accepted per draft</dt><dd>accepted / drafts: the same without the bonus token.</dd>
<dt>acceptance rate</dt><dd>accepted / drafted: the share of drafted tokens that were kept.</dd>
<dt>position i</dt><dd>The share of drafts whose tokens 1 to i were all accepted. The positions
add up to accepted per draft.</dd>
<dt>macro, pooled</dt><dd>macro is the plain mean over workloads; pooled sums all counters, so a
workload with more drafts weighs more. Counters in a macro row are sums.</dd>
<dt>interval (ci_low, ci_high)</dt><dd>95 % bootstrap interval, {{ bench.bootstrap_samples }}
resamples of prompts (for macro and pooled inside each workload). It covers the choice of prompts,
not the seed of a training.</dd>
<dt>samples</dt><dd>Conversations in one epoch of training; in the table of strategies, prompts
that were asked for, before any were held out or lost. own_samples: those of them that the verifier
answered itself.</dd>
<dt>self_difference</dt><dd>Acceptance length minus that of the speculator trained on the
verifier's own responses, same algorithm, after epoch self_epoch. Intervals are paired: each
resample draws the same prompts for both, and only prompts that both answered count.</dd>
<dt>start, training_tokens, train_seconds, teacher_seconds</dt><dd>A strategy may start from
another one's checkpoint. Its tokens (all epochs), seconds and teacher's seconds include those of
its start. teacher_seconds are seconds of generation times devices (on a CPU, threads), of whole
response sets; teacher_verifiers counts the study's verifiers that share them, and
teacher_seconds_per_verifier divides by that. Responses for vocabulary and validation are not
counted.</dd>
<dt>vocab_coverage</dt><dd>Share of the trained tokens that the draft vocabulary holds.</dd>
<dt>suggested</dt><dd>The earliest epoch against which no later one is clearly better, that is,
has a paired interval of the difference wholly above 0. An epoch inside a longer learning rate
schedule is not what a schedule of that length would give.</dd>
<dt>gain_share</dt><dd>How much of the gain from first to last measured epoch is reached; only
where that gain is clearly above 0.</dd>
<dt>failed</dt><dd>Requests that the server did not answer; they are in no other number.</dd>
<dt>dropped_overlap</dt><dd>Prompts left out since a training pool holds them too: the same prompt,
or {{ bench.overlap_ngram }} consecutive words in common.</dd>
<dt>losslessness</dt><dd>Greedy decoding with a speculator must return the verifier's own text.
identical counts prompts whose token ids equal the verifier's without speculator. Rounding differs
between batch sizes and can turn a near-tie, so the control compares the bare verifier with itself
at another number of requests in flight.</dd>
<dt>flagged (yellow, *)</dt><dd>Fewer than {{ bench.min_prompts }} prompts, for macro in any
workload: a hint, not a result.</dd></dl>
<h2>Raw data</h2>
<p>Tables as CSV and parquet are in <code>{{ tables }}</code>, figures in
<code>{{ figures }}</code>. The table <code>index</code> names the folder of every part by its key.
A part's <code>manifest.json</code> says what it was made from. Counters per request are in
<code>requests.parquet</code>, GuideLLM's reports in <code>guidellm.json</code>, losses per step in
<code>steps.csv</code>.</p>
<div class="scroll"><table>
<thead><tr><th class="text">stage</th><th>parts</th><th class="text">for example</th></tr></thead>
<tbody>{% for stage, count, folder in stages %}
<tr><td class="text">{{ stage }}</td><td>{{ count }}</td><td class="text">{{ folder }}</td></tr>
{%- endfor %}
</tbody></table></div></body></html>
"""
TEXTS = {
    "verifier", "model", "algorithm", "strategy", "workload", "hardware", "key", "device",
    "relation", "teachers", "start", "teacher_device", "teacher device", "reason",
}  # fmt: skip


def read_tables(folder: Path) -> dict[str, list[dict]]:
    """Read the tables' parquet files.

    Raises:
        UserError: when one is missing or damaged.
    """
    result = {}
    for name in TABLES:
        path = folder / f"{name}.parquet"
        try:
            result[name] = pq.read_table(path).to_pylist()
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read ({error}). Make the tables again.") from error
    return result


def read_losses(entry: dict) -> list[tuple[int, float]]:
    """Return (step, loss) of one trained epoch.

    Raises:
        UserError: when `steps.csv` is missing, cut or has no such columns.
    """
    manifest = statistics.open_part(entry, "speculators")
    path = store.data_file(entry["folder"], "steps.csv", manifest)
    try:
        with open(path, newline="") as stream:
            rows = [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(stream)]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: no usable columns step and loss ({error}).") from error
    if not rows:
        raise UserError(f"{path} has no row. Remove its folder; the next run makes it again.")
    return rows


def text(value) -> str:
    """Return a table cell: rounded, with a dash for nothing."""
    if value is None:
        return "\u2013"
    if not isinstance(value, float):
        return str(value)
    if value == 0 or abs(value) < 0.01:  # small numbers (learning rates) keep their digits
        return f"{value:.2g}"
    return f"{value:.3f}" if abs(value) < 100 else f"{value:,.1f}"


def html_table(rows: list[dict], title: str, opened: bool = True) -> dict:
    """Return what the template needs of a table, less what "What was run" holds."""
    hidden = ("model", "vllm", "seed")
    columns = [c for c in rows[0] if c not in hidden and any(r[c] is not None for r in rows)]
    shown = []
    for row in rows:
        summary = "summary" if row.get("workload") in (MACRO, POOLED) else ""
        style = f"{summary} {'flagged' if row.get('flagged') else ''}".strip()
        shown.append({"style": style, "cells": [(c, text(row[c])) for c in columns]})
    return {"columns": columns, "rows": shown, "title": title, "open": opened}


def pivot(rows: list[dict]) -> list[dict]:
    """Return acceptance lengths with one row per checkpoint and one column per workload."""
    result, workloads = [], list(dict.fromkeys(r["workload"] for r in rows))
    by = itemgetter("verifier", "algorithm", "strategy", "epoch", "k", "temperature")
    for name, own in grouped(rows, by).items():
        labels = ("verifier", "algorithm", "strategy", "epoch", "k", "temperature")
        cells = {r["workload"]: r for r in own}
        line = dict(zip(labels, name, strict=True))
        for workload in workloads:
            row = cells.get(workload)
            line[workload] = row and text(row["acceptance_length"]) + "*" * bool(row["flagged"])
        low, high = cells[MACRO]["ci_low"], cells[MACRO]["ci_high"]
        result.append(line | {"macro interval": f"{text(low)} to {text(high)}"})
    return result


def span(row: dict, name: str) -> str:
    """Return the interval of a column as text."""
    low, high = (row[f"{name}_ci_{end}"] for end in ("low", "high"))
    return "\u2013" if low is None else f"{text(low)} to {text(high)}"


def count(value) -> str:
    """Return a large number as text."""
    return "\u2013" if value is None else f"{value:,.0f}"


def compact(rows: list[dict]) -> list[dict]:
    """Return what decides between strategies: one row each, at an epoch that all have."""
    result = []
    for panel in results.equal_epochs(rows).values():
        plain = results.reference(panel)
        for row in panel:
            difference, found = row["self_difference"], span(row, "self_difference")
            result.append({
                **{c: row[c] for c in ("verifier", "algorithm", "strategy", "epoch", "teachers")},
                "start": row["start"], "samples": count(row["samples"]),
                "macro": row["macro"], "95 % interval": span(row, "macro"),
                "self_epoch": row["self_epoch"],
                "against self": "reference" if row["strategy"] == plain
                else None if difference is None else f"{difference:+.3f} ({found})",
                "training tokens": count(row["training_tokens"]),
                "teacher seconds": count(row["teacher_seconds"]),
                "shared by": row["teacher_verifiers"],
                "seconds per verifier": count(row["teacher_seconds_per_verifier"]),
                "teacher device": row["teacher_device"], "flagged": row["flagged"],
            })  # fmt: skip
    return result


def gist(row: dict, latency: list[dict], lossless: list[dict], workloads: int) -> str:
    """Return what a macro row, and the latency and pooled lossless rows beside it, say."""
    result = (
        f"On {row['verifier']}, the {row['algorithm']} speculator of strategy {row['strategy']} "
        f"reaches after epoch {row['epoch']} an acceptance length of "
        f"{text(row['acceptance_length'])} (macro mean over {workloads} workloads, 95 % interval "
        f"{text(row['ci_low'])} to {text(row['ci_high'])}, {row['prompts']} prompts, "
        f"k = {row['k']}{', too few prompts in a workload' if row['flagged'] else ''})."
    )
    for r in latency:
        if r["itl_speedup"] is not None:
            result += (
                f" With {r['concurrency']} in flight ({r['workload']}, {r['hardware']}) output "
                f"tokens come {r['itl_speedup']:.2f} times as fast as without it."
            )
    for r in (r for r in lossless if r["compared"]):
        result += f" {r['identical']} of {r['compared']} greedy outputs equal the verifier's own."
        if r["control_compared"]:
            result += (
                f" The verifier alone, at two batch sizes, agrees with itself in "
                f"{r['control_identical']} of {r['control_compared']}."
            )
    return result


def compact_epochs(rows: list[dict]) -> list[dict]:
    """Return the gain of each measured epoch, and the suggestion with its reason."""
    return [
        {
            **{c: row[c] for c in ("verifier", "algorithm", "strategy", "epoch", "macro")},
            "95 % interval": span(row, "macro"), "gain": row["gain"],
            "95 % interval of gain": span(row, "gain"), "gain_share": row["gain_share"],
            "validation_loss": row["validation_loss"],
            "suggested": "yes" if row["suggested"] else "", "reason": row["reason"],
            "flagged": row["flagged"],
        }
        for row in rows
    ]  # fmt: skip


def headline(tables: dict) -> list[str]:
    """Return one paragraph per verifier, algorithm and strategy on its last epoch."""
    result, key = [], itemgetter("verifier", "algorithm", "strategy", "epoch")
    for row in last_macro(tables).values():
        own = {name: [r for r in rows if key(r) == key(row)] for name, rows in tables.items()}
        pooled = [r for r in own["lossless"] if r["workload"] == POOLED]
        result.append(gist(row, own["latency"], pooled, len(own["acceptance"]) - 2))
    return result or ["No speculator was measured in this study."]


def answers(tables: dict) -> list[tuple[str, list[str]]]:
    """Return title and sentences per verifier and algorithm; see `results.sentences`."""
    found = results.sentences(tables["strategies"], tables["epochs"])
    return [(" / ".join(name), told) for name, told in found.items()]


def run_facts(plan: dict, tables: dict) -> list[tuple[str, str]]:
    """Return name and value of what was run, library versions as the parts recorded them."""
    found, parts = defaultdict(set), plan["acceptance"] + plan["latency"] + plan["training"]
    for entry in parts:
        for library, version in store.read_manifest(entry["folder"])["versions"].items():
            found[library].add(version)
    entries = plan["acceptance"] + plan["latency"]
    drafting = [e for e in entries if e["epoch"] is not None]
    listed = lambda rows, c: ", ".join(map(str, dict.fromkeys(r[c] for r in rows)))  # noqa: E731
    return [
        ("study", plan["study"]), ("verifier", listed(entries, "verifier")),
        ("model", listed(entries, "model")), ("algorithm", listed(drafting, "algorithm")),
        ("strategy", listed(drafting, "strategy")), ("epochs", listed(drafting, "epoch")),
        ("k (tokens per draft)", listed(drafting, "k")),
        ("temperature", listed(entries, "temperature")),
        ("seed", str(plan["seed"])),
        ("planned length of the schedule (epochs)", listed(tables["training"], "schedule_epochs")),
        ("versions", ", ".join(f"{n} {'/'.join(sorted(v))}" for n, v in sorted(found.items()))),
    ]  # fmt: skip


def sections(tables: dict, images: dict[str, bytes]) -> list[dict]:
    """Return title, note, figures and tables of the page's middle part."""
    layout = (
        ("Which data to pay for", "strategies",
         ("acceptance_by_strategy", "acceptance_by_own_samples"),
         "Each strategy after its last measured epoch. It is compared with self after the same "
         "number of epochs where that was measured, else with self's last (self_epoch). Intervals "
         "are over prompts; another seed of a training moves a number as well, so small "
         "differences are no reason to pay."),
        ("How many epochs", "epochs", (), "Gains are over the measured epoch before."),
        ("Acceptance length", "acceptance", ("acceptance_by_epoch", "position_rates"),
         "* and yellow rows: too few prompts."),
        ("Losslessness", "lossless", (), ""),
        ("Latency", "latency", ("latency",),
         "Medians; p95 and p99 beside them. Speedups above 1 are gains over the bare verifier."),
        ("Training", "training", ("training_loss",),
         "val_acc_i: share of held-out tokens guessed right up to position i."),
    )  # fmt: skip
    short = {
        "acceptance": ("acceptance length by workload", pivot),
        "strategies": ("what each strategy gives and costs", compact),
        "epochs": ("what each epoch gives", compact_epochs),
    }
    result = []
    for title, name, shown_figures, note in layout:
        if rows := tables[name]:
            shown = [html_table(rows, f"all {len(rows)} rows", name not in short)]
            if name in short:
                heading, shorten = short[name]
                shown.insert(0, html_table(shorten(rows), heading))
            drawn = [
                {"name": f, "caption": CAPTIONS[f], "data": base64.b64encode(images[f]).decode()}
                for f in shown_figures if f in images
            ]  # fmt: skip
            result.append({
                "title": title, "note": note, "figures": drawn, "tables": shown,
                "answer": name in ("strategies", "epochs")})  # fmt: skip
    return result


def main(args) -> None:
    """Write the figures and `args.out`."""
    plan, tables = statistics.read_plan(args.plan), read_tables(args.tables)
    losses = {entry["key"]: read_losses(entry) for entry in plan["training"]}
    drawn = {
        "acceptance_by_strategy": figures.draw_strategies(tables),
        "acceptance_by_own_samples": figures.draw_own_samples(tables),
        "acceptance_by_epoch": figures.draw_acceptance(tables),
        "position_rates": figures.draw_positions(tables),
        "training_loss": figures.draw_losses(tables, losses),
        "latency": figures.draw_latency(tables),
    }
    images = figures.save(drawn, args.figures)
    stages = grouped(plan["index"], itemgetter("stage"))
    pages = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    html = pages.from_string(TEMPLATE).render(
        study=plan["study"], headline=headline(tables), run=run_facts(plan, tables), few=FEW,
        answers=answers(tables), notices=plan.get("notices", []),
        sections=sections(tables, images), bench=plan["bench"], tables=args.tables,
        figures=args.figures, texts=TEXTS,
        stages=[(stage, len(rows), rows[0]["folder"]) for stage, rows in stages.items()],
    )  # fmt: skip
    with store.replacing(args.out) as temporary:
        temporary.write_text(html, encoding="utf-8")
    cli.log.info("report: %s", args.out)


if __name__ == "__main__":
    parser = cli.parser(__doc__)
    parser.add_argument("--plan", type=Path, required=True, help="parts of the study (JSON)")
    parser.add_argument("--tables", type=Path, required=True, help="folder of the tables")
    parser.add_argument("--figures", type=Path, required=True, help="folder for the figures")
    parser.add_argument("--out", type=Path, required=True, help="HTML file to write")
    cli.run(main, parser.parse_args())
