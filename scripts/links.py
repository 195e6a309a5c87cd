#!/usr/bin/env python3
"""Stage tables: `results/current/<stage>/<names>` links to the keys now in use.

Links that the present configuration does not give are removed; nothing else is.
"""

import json
import os
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])
from scripts.lib import cli, store

README = """Links to the parts that the present configuration uses, by stage and name.
The checkpoint to serve is speculators/<verifier>/<algorithm>/<strategy>/epoch-<n>/checkpoint.
"""


def main(args) -> None:
    """Refresh the links below `args.out`."""
    wanted = {
        args.out / row["stage"] / row["name"]: Path(row["folder"]).resolve()
        for row in json.loads(args.plan.read_text())["index"]
        if (Path(row["folder"]) / store.MANIFEST).exists()
    }
    for path in args.out.rglob("*"):
        if path.is_symlink() and path not in wanted:
            path.unlink()
    for path, target in wanted.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        text = os.path.relpath(target, path.parent.resolve())
        if path.is_symlink():
            if os.readlink(path) == text:
                continue
            path.unlink()
        path.symlink_to(text)
    with store.replacing(args.out / "README") as temporary:
        temporary.write_text(README)
    cli.log.info("links: %d below %s", len(wanted), args.out)


if __name__ == "__main__":
    parser = cli.parser(__doc__)
    parser.add_argument("--plan", type=Path, required=True, help="plan.json")
    parser.add_argument("--out", type=Path, required=True, help="folder of the links")
    cli.run(main, parser.parse_args())
