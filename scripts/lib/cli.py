"""How every script starts, reports progress and ends.

`run` gives all of them one behaviour: messages on the terminal and in the log,
library noise in the log only, one line for a user's mistake, and a distinct
exit status for an interruption.
"""

import argparse
import errno
import json
import logging
import os
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import TextIO

import yaml

from scripts.lib.errors import UserError

log = logging.getLogger("workflow")
_terminals: list[TextIO] = []

_NO_SPACE = 8 * 2**20  # bytes; too little for any of our files
EXIT_ERROR, EXIT_USER_ERROR, EXIT_INTERRUPTED = 1, 2, 130


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the flags that every script has."""
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("--log", type=Path, help="file that also receives the libraries' output")
    return result


def study_parser(description: str | None, default: Path) -> argparse.ArgumentParser:
    """Return a parser of programs about a study: its file, and settings laid over it.

    Args:
        description: of the program.
        default: the study when none is named.
    """
    result = parser(description)
    result.add_argument("--configfile", type=Path, default=default, help="the study")
    result.add_argument(
        "--config", type=_setting, nargs="*", default=[], metavar="KEY=VALUE",
        help="as given to Snakemake",
    )  # fmt: skip
    return result


def _setting(text: str) -> tuple[str, object]:
    key, _, value = text.partition("=")
    return key, yaml.safe_load(value)


def json_argument(text: str):
    """Parse a JSON command line value (argparse `type`)."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not valid JSON ({error}): {text}") from error


def _set_up_logging(log_file: Path | None, terminal_file: Path | None = None) -> None:
    """Send our messages to the terminal and `log_file`, all other output to the file.

    Args:
        log_file: also receives the libraries' output.
        terminal_file: takes the terminal's place, for a process whose parent shows it.
    """
    terminal: TextIO
    if terminal_file:
        terminal = open(terminal_file, "a", buffering=1)  # noqa: SIM115 (open to the end)
    else:
        terminal = os.fdopen(os.dup(2), "w", buffering=1)
    _terminals.append(terminal)
    handlers: list[logging.Handler] = [logging.StreamHandler(terminal)]
    if log_file is not None:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
        handlers.append(logging.StreamHandler(sys.stderr))
    formatter = logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S")
    for handler in handlers:
        handler.setFormatter(formatter)
        log.addHandler(handler)
    # Of several processes with one task the first speaks for all, unless something fails.
    log.setLevel(logging.ERROR if os.environ.get("RANK", "0") != "0" else logging.INFO)
    log.propagate = False


def show(line: str) -> None:
    """Write a line to the terminal alone: what a child process said and logged itself."""
    for terminal in _terminals:
        print(line, file=terminal)


def _raise_interrupt(signum, frame):
    # One interruption is enough: a second one must not cut the clean-up short.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt(signal.Signals(signum).name)


def _is_full_disk(error: Exception, args: argparse.Namespace) -> bool:
    """Return whether an error came from a full disk.

    Libraries wrap the error number (torch.save, safetensors), so the free space of
    the output's disk is asked as well.
    """
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        return True
    if "No space left on device" in str(error):
        return True
    target = getattr(args, "out", None) or getattr(args, "batch", None)
    folder = next((p for p in Path(target or ".").absolute().parents if p.exists()), Path())
    return shutil.disk_usage(folder).free < _NO_SPACE


def run(main, args: argparse.Namespace) -> None:
    """Call `main(args)` and exit the process with a status and a message that fit.

    SIGTERM (Snakemake, Slurm) is turned into KeyboardInterrupt, so that `with`
    and `finally` blocks stop servers and release claims on every way out.
    """
    _set_up_logging(args.log, getattr(args, "worker", None))
    signal.signal(signal.SIGINT, _raise_interrupt)
    signal.signal(signal.SIGTERM, _raise_interrupt)
    where = f" (details: {args.log})" if args.log else ""
    try:
        main(args)
        status = 0
    except UserError as error:
        log.error("error: %s", error)
        status = EXIT_USER_ERROR
    except KeyboardInterrupt:
        log.error("interrupted: finished parts are kept, the next run goes on from there")
        status = EXIT_INTERRUPTED
    except Exception as error:  # the last resort: still one line on the terminal
        traceback.print_exc()
        if _is_full_disk(error, args):
            log.error(
                "error: disk full while writing %s. Free space or move `store`, then run "
                "again: finished parts are kept.",
                getattr(error, "filename", None) or "results",
            )
            status = EXIT_USER_ERROR
        else:
            log.error("error: %s: %s%s", type(error).__name__, error, where)
            status = EXIT_ERROR
    sys.stdout.flush()
    sys.stderr.flush()
    # Engines leave non-daemon threads behind that would keep a failed job alive.
    os._exit(status)


class Progress:
    """Report a count's rate and remaining time at most every `every` seconds."""

    def __init__(self, what: str, total: int, unit: str, done: int = 0, every: float = 10.0):
        self.what, self.total, self.unit, self.every = what, total, unit, every
        self.done = self.first = done
        self.extra = 0.0
        self.start = self.last = time.monotonic()

    def add(self, count: int = 1, note: str = "") -> None:
        """Count `count` more and report if it is time to."""
        self.done += count
        now = time.monotonic()
        if now - self.last >= self.every or self.done >= self.total:
            self.last = now
            rate = (self.done - self.first) / max(now - self.start, 1e-9)
            left = (self.total - self.done) / rate if rate > 0 else float("inf")
            eta = f"{left:.0f} s left" if left != float("inf") else "no rate yet"
            log.info(
                "%s: %d/%d %s, %.2f/s, %s%s",
                self.what,
                self.done,
                self.total,
                self.unit,
                rate,
                eta,
                f", {note}" if note else "",
            )
