# tables: all parts of the configuration -> tables, figures, report, links.
# Cheap; rebuilt whenever a part, a label, or one of these scripts changes.

LIB = SCRIPTS / "lib"
LABELS = study_labels(PLAN)


def code(*files):
    """Return a digest of source files, to be a tracked parameter."""
    return digest([pin_file(f) for f in files])


localrules:
    write_plan,
    make_tables,
    make_answers,
    make_report,
    link_current,


rule write_plan:
    output:
        "results/tables/plan.json",
    params:
        content=canonical_json(LABELS),
    run:
        write_json(Path(output[0]), LABELS)


rule make_tables:
    input:
        PLAN.inputs(PLAN.targets()),
        [n.manifest for n in PLAN.nodes("speculators")],
        plan="results/tables/plan.json",
    output:
        multiext("results/tables/acceptance", ".csv", ".parquet"),
        multiext("results/tables/lossless", ".csv", ".parquet"),
        multiext("results/tables/latency", ".csv", ".parquet"),
        multiext("results/tables/training", ".csv", ".parquet"),
        "results/tables/index.parquet",
        "results/tables/summary.txt",
        "results/index.csv",
    log:
        "results/logs/tables.log",
    params:
        code=code(SCRIPTS / "tables.py", LIB / "results.py", LIB / "statistics.py"),
    shell:
        "{RUN}/tables.py --plan {input.plan:q} --out results/tables"
        " --index results/index.csv --log {log:q}"


# Responses are no input: they may have been removed, and are not worth making again for
# a table. Whatever made the speculators has read them before.
rule make_answers:
    input:
        PLAN.inputs(PLAN.targets()),
        [n.manifest for n in PLAN.nodes("speculators")],
        plan="results/tables/plan.json",
    output:
        multiext("results/tables/strategies", ".csv", ".parquet"),
        multiext("results/tables/epochs", ".csv", ".parquet"),
        "results/tables/answers.txt",
    log:
        "results/logs/answers.log",
    params:
        code=code(SCRIPTS / "answers.py", LIB / "results.py", LIB / "statistics.py"),
    shell:
        "{RUN}/answers.py --plan {input.plan:q} --out results/tables --log {log:q}"


rule make_report:
    input:
        rules.make_tables.output,
        rules.make_answers.output,
        plan="results/tables/plan.json",
    output:
        "results/report.html",
    log:
        "results/logs/report.log",
    params:
        code=code(
            SCRIPTS / "report.py", LIB / "figures.py", LIB / "results.py", LIB / "statistics.py"
        ),
    shell:
        "{RUN}/report.py --plan {input.plan:q} --tables results/tables"
        " --figures results/figures --out {output:q} --log {log:q}"


rule link_current:
    input:
        rules.make_tables.output,
        plan="results/tables/plan.json",
    output:
        "results/current/README",
    log:
        "results/logs/links.log",
    params:
        code=code(SCRIPTS / "links.py"),
    shell:
        "{RUN}/links.py --plan {input.plan:q} --out results/current --log {log:q}"
