#!/usr/bin/env python3
"""Start, stop and show a real Slurm of four simulated GPU nodes on this machine, for the tests.

The daemons are Debian's, the GPUs are empty devices: scheduling, requeueing, preemption and
CUDA_VISIBLE_DEVICES are real, computing on the GPUs is not. Root is needed, systemd is not.
Exit status: 0 done, 1 failed (or not up, for `status`), 3 skipped because the machine cannot.
"""

import argparse
import contextlib
import fcntl
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FOLDER = Path("/tmp/test-slurm")
PACKAGES = ("munge", "slurmctld", "slurmd", "slurm-client")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
NODES = {"h100n1": "h100", "h100n2": "h100", "a100n1": "a100", "a100n2": "a100"}
GPUS = 8
# Slurm's programs lose SLURM_CONF on the way into a job step, so only this place will do.
ETC = Path("/etc/slurm")
# A link into a folder of this name is ours, also when the folder is gone.
CONFIG = "test-slurm-etc"
PARTS = (CONFIG, "munge", "devices", "state", "spool", "run", "log")

SLURM_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
# A requeued job waits until its old credential has expired: 120 s unless set here.
AuthInfo=socket={folder}/munge/socket,cred_expire=15
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
# The nodes claim more cores and memory than the machine has.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
GresTypes=gpu
# Without a default a job that names no memory takes all of its node's.
DefMemPerCPU=1024
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
KillWait=2
MinJobAge=300
# Long, because a loaded machine answers late; kill_node() does not wait for it.
SlurmdTimeout=120
SlurmctldTimeout=120
MessageTimeout=30
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=0,bf_interval=2
"""
PARTITIONS = """\
PartitionName=cpu Nodes=ALL Default=YES PriorityTier=1 PreemptMode=OFF
PartitionName=h100 Nodes=h100n[1-2] PriorityTier=1 PreemptMode=REQUEUE
PartitionName=a100 Nodes=a100n[1-2] PriorityTier=1 PreemptMode=REQUEUE
PartitionName=h100_urgent Nodes=h100n[1-2] PriorityTier=10 PreemptMode=OFF
PartitionName=a100_urgent Nodes=a100n[1-2] PriorityTier=10 PreemptMode=OFF
"""


class Failed(RuntimeError):
    """Something that should have worked did not."""


class Skipped(RuntimeError):
    """This machine cannot run the test Slurm."""


# Commands and processes


def environment() -> dict[str, str]:
    """Return the environment without what an outer Slurm or a user's defaults set."""
    ours = {
        k: v
        for k, v in os.environ.items()
        if not re.match("SLURM|SBATCH|SALLOC|SRUN|SQUEUE|SINFO|SCANCEL", k)
    }
    path = os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin"
    return ours | {"PATH": path, "LC_ALL": "C"}


def run(*command: object, seconds: float = 30) -> str:
    """Return what a command prints; after `seconds` it is killed with its children.

    Output goes through files: a pipe would stay open in daemons that the command starts.
    """
    words = [str(word) for word in command]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment(),
            start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise Failed(f"{' '.join(words)}: no end after {seconds:g} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        out.seek(0)
        err.seek(0)
        text, errors = out.read(), err.read()
    if process.returncode:
        last = "\n".join((text + errors).strip().splitlines()[-15:])
        raise Failed(f"{' '.join(words)}: exit status {process.returncode}\n{last}")
    return text


def wait_until(condition, seconds: float, what: str):
    """Return the first true value of `condition()`; fail, naming `what`, after `seconds`."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > end:
            raise Failed(f"{what}: not within {seconds:g} s")
        time.sleep(0.2)
    return value


def processes(folder: Path, node: str = "") -> list[int]:
    """Return the living processes of the cluster in `folder`, or of one of its nodes.

    Daemons and job steps are known by their log files and their command lines, jobs by their
    environment, and the children of all count. Pid files would miss all but the daemons.
    """
    conf = f"SLURM_CONF={folder}/{CONFIG}/slurm.conf"
    marks = {f"SLURMD_NODENAME={node}", f"{folder}/log/slurmd.{node}.log"}
    parents, daemons, jobs = {}, [], []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or entry.name == str(os.getpid()):
            continue
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            program = os.path.basename(os.readlink(entry / "exe"))
            traces = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            daemon = program.startswith(("munged", "slurmctld", "slurmd", "slurmstepd"))
            if daemon:
                traces += [os.readlink(file) for file in (entry / "fd").iterdir()]
            else:
                traces += (entry / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # a thread of the kernel, or ended meanwhile
            continue
        if state == "Z":
            continue
        pid = int(entry.name)
        parents[pid] = int(parent)
        if node and not marks & set(traces):
            continue
        if daemon and any(f"{folder}/" in trace for trace in traces):
            daemons.append(pid)
        elif conf in traces and any(t.startswith("SLURMD_NODENAME=") for t in traces):
            jobs.append(pid)
    found = dict.fromkeys(daemons + jobs)
    while more := [p for p, parent in parents.items() if parent in found and p not in found]:
        found |= dict.fromkeys(more)
    return list(found)


def kill(folder: Path, node: str = "") -> None:
    """Kill what runs of the cluster, or of one node; return when it is gone.

    Daemons go first: a step that saw its job die would report a failed job, not a lost node.
    """

    def gone():
        pids = processes(folder, node)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not pids

    wait_until(gone, 20, f"end of the processes of {node or folder}")


# The cluster


def active() -> Path | None:
    """Return the folder that /etc/slurm points to, if one of ours."""
    link = ETC / "slurm.conf"
    if link.is_symlink() and link.readlink().parent.name == CONFIG:
        return link.readlink().parent.parent
    return None


def nodes() -> dict[str, str]:
    """Return the state of each node, such as idle or mixed."""
    rows = run("sinfo", "--noheader", "--Node", "--format", "%N %T", seconds=10).splitlines()
    return dict(row.split() for row in rows)


def queue() -> list[dict[str, str]]:
    """Return the jobs that Slurm knows, those that ended in the last five minutes as well."""
    fields = {
        "id": "%i", "state": "%T", "partition": "%P", "nodes": "%N", "reason": "%r",
        "name": "%j", "comment": "%k",
    }  # fmt: skip
    layout = "\t".join(fields.values())
    rows = run("squeue", "--noheader", "--states=all", "--format", layout).splitlines()
    return [dict(zip(fields, row.split("\t"), strict=True)) for row in rows]


def cancel_all(seconds: float = 30) -> None:
    """Cancel all jobs and wait for their end."""

    def left():
        return run("squeue", "--noheader", "--format=%i", seconds=5).split()

    if jobs := left():
        run("scancel", *jobs, seconds=5)
        wait_until(lambda: not left(), seconds, "end of the cancelled jobs")


def is_up(folder: Path) -> bool:
    """Whether the cluster of `folder` answers and has all of its nodes."""
    if active() == folder:
        with contextlib.suppress(Failed):
            states = nodes()
            return set(states) == set(NODES) and not re.search("down|unk", str(states))
    return False


def free_ports(count: int) -> list[int]:
    """Return neighbouring ports that nobody uses, below those the kernel gives to clients."""
    for first in range(17000, 30000, 10):
        ports = list(range(first, first + count))
        with contextlib.ExitStack() as open_sockets, contextlib.suppress(OSError):
            for port in ports:
                open_sockets.enter_context(socket.socket()).bind(("", port))
            return ports
    raise Failed("no free ports between 17000 and 30000")


def write_config(folder: Path) -> None:
    """Write keys, devices and settings of a new cluster."""
    for part in PARTS:
        (folder / part).mkdir(mode=0o755)
    key = folder / "munge/key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    port, *node_ports = free_ports(1 + len(NODES))
    host = socket.gethostname().split(".")[0]
    slurm, gres = SLURM_CONF.format(folder=folder, host=host, port=port), ""
    for (node, kind), node_port in zip(NODES.items(), node_ports, strict=True):
        # Slurm removes GPUs without a file, and gives jobs no CUDA_VISIBLE_DEVICES for files
        # that are no devices. These are copies of /dev/null, which nothing opens.
        for i in range(GPUS):
            os.mknod(folder / f"devices/{node}-{i}", 0o20666, os.makedev(1, 3))
        files = f"{folder}/devices/{node}-[0-{GPUS - 1}]"
        gres += f"NodeName={node} AutoDetect=off Name=gpu Type={kind} File={files}\n"
        slurm += (
            f"NodeName={node} NodeHostname={node} NodeAddr=127.0.0.1 Port={node_port}"
            f" CPUs=96 RealMemory=1000000 Gres=gpu:{kind}:{GPUS}\n"
        )
    config = folder / CONFIG
    (config / "slurm.conf").write_text(slurm + PARTITIONS)
    (config / "gres.conf").write_text(gres)
    # slurmd loads a cgroup plugin even if nothing uses it; this one asks for no systemd.
    (config / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")


def links(folder: Path) -> dict[Path, Path]:
    """Return the links that /etc/slurm must hold, with their targets."""
    names = ("slurm.conf", "gres.conf", "cgroup.conf")
    return {ETC / name: folder / CONFIG / name for name in names}


def set_links(folder: Path) -> None:
    """Let /etc/slurm point to the cluster of `folder`."""
    ETC.mkdir(exist_ok=True)
    remove_links()
    for link in links(folder):
        if link.exists() or link.is_symlink():
            raise Failed(f"{link} belongs to another Slurm: it stays as it is, nothing started")
    for link, target in links(folder).items():
        link.symlink_to(target)


def remove_links() -> None:
    """Remove from /etc/slurm what is ours."""
    for link in links(FOLDER):
        if link.is_symlink() and link.readlink().parent.name == CONFIG:
            link.unlink()


def clear(folder: Path) -> None:
    """Remove the folder of a cluster, but no other folder."""
    if (folder / CONFIG).is_dir():
        shutil.rmtree(folder)


def start_node(folder: Path, node: str) -> None:
    run("slurmd", "-N", node, "-f", folder / CONFIG / "slurm.conf")


def start_daemons(folder: Path) -> None:
    """Start munge, the controller and the nodes; return when all nodes are idle."""
    munge = folder / "munge"
    run(
        "munged", "--force", f"--key-file={munge}/key", f"--socket={munge}/socket",
        f"--pid-file={folder}/run/munged.pid", f"--seed-file={munge}/seed",
        f"--log-file={folder}/log/munged.log", "--num-threads=2",
    )  # fmt: skip
    # -c: job numbers and node states start anew with every cluster.
    run("slurmctld", "-c", "-f", folder / CONFIG / "slurm.conf")
    for node in NODES:
        start_node(folder, node)

    def all_idle():
        with contextlib.suppress(Failed):  # the controller may not answer yet
            return nodes() == dict.fromkeys(NODES, "idle")

    wait_until(all_idle, 60, "all nodes idle")


@contextlib.contextmanager
def one_at_a_time():
    """Keep two starts apart; the lock ends with its process."""
    with open("/run/lock/test-slurm", "w") as file:

        def locked():
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True

        wait_until(locked, 120, "end of another start of the test Slurm")
        yield


def last_lines(folder: Path) -> str:
    """Return the ends of the logs."""
    text = ""
    for log in sorted((folder / "log").glob("*.log")):
        lines = log.read_text(errors="replace").splitlines()[-8:]
        text += "\n".join([f"\n--- {log}", *lines])
    return text


def needs_root() -> None:
    if os.geteuid() != 0:
        raise Skipped("the test Slurm needs root")


def missing_programs() -> list[str]:
    return [p for p in PROGRAMS if not shutil.which(p, path=environment()["PATH"])]


def start(folder: Path = FOLDER, owner: int | None = None) -> bool:
    """Start a cluster in `folder`; return whether it was not up yet.

    There is one per machine. One in another folder is replaced if nothing of it runs, or if its
    `owner`, the process that wanted it, is dead.
    """
    needs_root()
    if missing := missing_programs():
        raise Skipped(f"{', '.join(missing)} not found: run `{Path(__file__).name} install`")
    folder = folder.resolve()
    # Job steps have sockets in it, whose paths may have 107 characters; settings are not quoted.
    if len(str(folder)) > 70 or not re.fullmatch(r"[\w/.+-]+", str(folder)):
        raise Failed(f"{folder}: a shorter path of plain characters is needed")
    with one_at_a_time():
        if is_up(folder):
            return False
        other = active()
        if other and other != folder and processes(other):
            if not abandoned(other):
                raise Failed(f"a test Slurm is up in {other}: stop that one first")
            stop(other)
        stop(folder)
        clear(folder)
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise Failed(f"{folder} holds something else: name an empty or a new folder")
        try:
            write_config(folder)
            (folder / "owner").write_text(str(owner or ""))
            set_links(folder)
            start_daemons(folder)
        except BaseException as error:
            logs = last_lines(folder)
            stop(folder)
            if isinstance(error, Failed):
                raise Failed(f"{error}{logs}") from None
            raise
    return True


def abandoned(folder: Path) -> bool:
    """Whether the process that wanted the cluster of `folder` is dead."""
    with contextlib.suppress(OSError):
        owner = (folder / "owner").read_text()
        return bool(owner) and not Path("/proc", owner).exists()
    return False


def stop(folder: Path = FOLDER, wipe: bool = False) -> bool:
    """End the cluster of `folder` with all jobs; return whether anything of it ran."""
    folder = folder.resolve()
    ran = bool(processes(folder))
    if ran or active() == folder:
        needs_root()
    if ran and active() == folder:
        # Jobs may clean up as after any scancel. What is left is killed, daemons alive or not.
        with contextlib.suppress(Failed):
            cancel_all(seconds=5)
    kill(folder)
    if active() in (None, folder):
        remove_links()
    if wipe:
        clear(folder)
    return ran


@contextlib.contextmanager
def running(folder: Path = FOLDER):
    """Have a cluster while a `with` block runs; one that was up before stays up."""
    started = start(folder, owner=os.getpid())
    try:
        yield folder
    finally:
        if started:
            stop(folder)


def kill_node(node: str, down: bool = True) -> None:
    """Let a node die with all that runs on it.

    Slurm is told at once, so that it requeues the jobs; without `down` it has to find out
    (SlurmdTimeout).
    """
    folder = active()
    assert folder, "no test Slurm is up"
    kill(folder, node)
    if down:
        run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=killed")


def revive_node(node: str) -> None:
    """Start a killed node; return when it takes jobs again."""
    folder = active()
    assert folder, "no test Slurm is up"
    start_node(folder, node)
    wait_until(lambda: nodes()[node] in ("idle", "mixed", "allocated"), 60, f"{node} idle")


# Installation


@contextlib.contextmanager
def no_daemons():
    """Keep apt from starting the packages' own daemons, which would have other settings."""
    policy, kept = Path("/usr/sbin/policy-rc.d"), Path("/usr/sbin/policy-rc.d.kept")
    if policy.exists() and not kept.exists():
        policy.rename(kept)
    try:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
        yield
    finally:
        policy.unlink(missing_ok=True)
        if kept.exists():
            kept.rename(policy)


def install() -> bool:
    """Install Slurm and munge with apt; return whether anything was missing."""
    if not missing_programs():
        return False
    needs_root()
    if not shutil.which("apt-get"):
        raise Skipped("no apt-get: install munge and Slurm (slurmctld, slurmd, clients) by hand")
    apt = (
        "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "--yes", "--no-install-recommends",
        "-o", "DPkg::Lock::Timeout=60", "-o", "Acquire::Retries=1",
        "-o", "Acquire::http::Timeout=20", "-o", "Acquire::https::Timeout=20",
    )  # fmt: skip
    get = (*apt, "--download-only", "install", *PACKAGES)
    try:
        try:
            run(*get, seconds=180)
        except Failed:  # the lists of packages are missing or old
            run(*apt, "update", seconds=180)
            run(*get, seconds=180)
    except Failed as error:
        raise Skipped(f"apt cannot get the packages (no network?)\n{error}") from None
    with no_daemons():
        run(*apt, "--no-download", "install", *PACKAGES, seconds=300)
    if missing := missing_programs():
        raise Failed(f"{', '.join(missing)} still not found")
    return True


# Command line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("install", help="install Slurm and munge with apt")
    folder = argparse.ArgumentParser(add_help=False)
    folder.add_argument(
        "--folder", type=Path, help=f"where the cluster lives (that of /etc/slurm, or {FOLDER})"
    )
    commands.add_parser("start", parents=[folder], help="return when all nodes are idle")
    ending = commands.add_parser("stop", parents=[folder], help="end all jobs and daemons")
    ending.add_argument("--wipe", action="store_true", help="remove the folder with its logs too")
    commands.add_parser("status", parents=[folder], help="show nodes and jobs")
    args = parser.parse_args()
    # A start that is told to end tidies up first.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    begun = time.monotonic()
    try:
        if args.command == "install":
            done = "installed" if install() else "already installed"
        else:
            done = None
            where = (args.folder or active() or FOLDER).resolve()
            if args.command == "start":
                new = start(where)
                done = f"{'up' if new else 'already up'} in {where}: {', '.join(NODES)}"
            elif args.command == "stop":
                ran = stop(where, args.wipe)
                done = f"stopped {where}" if ran else f"nothing ran in {where}"
            elif not is_up(where):
                print(f"not up in {where}")
                return 1
            else:
                print(f"up in {where}")
                print(run("sinfo", "--Node", "--format", "%10N %14P %10T %G"), end="")
                print(run("squeue"), end="")
    except Skipped as reason:
        print(f"skipped: {reason}", file=sys.stderr)
        return 3
    except (Failed, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if done:
        print(f"{done} ({time.monotonic() - begun:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
