# economics: manifests of all parts, acceptance and latency tables -> costs, economics.
# Cheap; rebuilt whenever a table, a label, a price or one of these scripts changes.


localrules:
    make_economics,


rule make_economics:
    input:
        rules.make_tables.output,
        plan="results/tables/plan.json",
    output:
        multiext("results/tables/costs", ".csv", ".parquet"),
        multiext("results/tables/economics", ".csv", ".parquet"),
    log:
        "results/logs/economics.log",
    params:
        code=code(
            SCRIPTS / "economics.py",
            LIB / "economics.py",
            LIB / "costs.py",
            LIB / "results.py",
            LIB / "statistics.py",
        ),
    shell:
        "{RUN}/economics.py --plan {input.plan:q} --tables results/tables"
        " --out results/tables --log {log:q}"
