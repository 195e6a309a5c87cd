#!/usr/bin/env python3
"""List stored parts that no given configuration refers to; remove them on demand.

    python scripts/gc.py                                 lists, with sizes
    python scripts/gc.py --configfile a.yaml b.yaml      ... that none of these uses
    python scripts/gc.py --remove                        removes what it lists

A part that is being made (it has a claim) is never touched.
"""

import shutil
import sys
from pathlib import Path

import yaml

sys.path[0] = str(Path(__file__).resolve().parents[1])
from scripts.lib import cli, store
from scripts.lib.config import check
from scripts.lib.labels import study_labels
from scripts.lib.plan import Plan

DEFAULT = Path(__file__).resolve().parents[1] / "config" / "config.yaml"


def unused(root: Path, used: set[str]) -> list[tuple[Path, int]]:
    """Return (folder, bytes) of part folders below `root` that are not in `used`."""
    result = []
    for folder in sorted(p for p in root.rglob("*") if p.is_dir() and store.looks_like_key(p.name)):
        holds_batches = any(folder.glob("batch-*"))
        if str(folder.resolve()) in used or holds_batches or (folder / store.CLAIM).exists():
            continue
        size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
        result.append((folder, size))
    return result


def main(args) -> None:
    """List, and with `--remove` delete, unused parts."""
    used: set[str] = set()
    stores = set()
    for path in args.configfile:
        plan = Plan(check(yaml.safe_load(path.read_text())))
        used |= {str(Path(row["folder"]).resolve()) for row in study_labels(plan)["index"]}
        stores.add(Path(plan.store).resolve())
    total = 0
    for root in sorted(stores):
        for folder, size in unused(root, used):
            total += size
            cli.log.info("%8.1f MB  %s", size / 2**20, folder)
            if args.remove:
                shutil.rmtree(folder)
    cli.log.info("%s %.1f MB", "removed" if args.remove else "unused:", total / 2**20)


if __name__ == "__main__":
    parser = cli.parser(__doc__)
    parser.add_argument(
        "--configfile", type=Path, nargs="+", default=[DEFAULT],
        help="configurations whose parts are kept",
    )  # fmt: skip
    parser.add_argument("--remove", action="store_true", help="remove what is listed")
    cli.run(main, parser.parse_args())
