"""What the workflow counts on in a Slurm, on the real one of `slurm/cluster.py`."""

import cluster
import pytest

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("no_jobs_left")]

# Says when and where it runs; the first run lasts until something ends it, the next is short.
LONG = 'echo "$SLURMD_NODENAME"; test -n "$SLURM_RESTART_COUNT" || sleep 300; echo end'
# Slurm holds a requeued job back for 15 s (cred_expire in slurm.conf).
REQUEUED = 60


@pytest.fixture
def folder(slurm):
    return slurm


def submit(folder, script: str, *options: str) -> str:
    """Submit a script and return its job's number."""
    return cluster.run(
        "sbatch", "--parsable", f"--chdir={folder}", "--output=%j.out", "--open-mode=append",
        *options, f"--wrap={script}",
    ).strip()  # fmt: skip


def job(number: str) -> dict[str, str]:
    return next(row for row in cluster.queue() if row["id"] == number)


def wait_for(number: str, state: str, seconds: float = 30) -> None:
    what = f"job {number} {state}"
    cluster.wait_until(lambda: job(number)["state"] == state, seconds, what)


def lines(folder, number: str) -> list[str]:
    """Return what the job has written, without Slurm's own messages."""
    file = folder / f"{number}.out"
    text = file.read_text().splitlines() if file.exists() else []
    return [line for line in text if not line.startswith("slurmstepd")]


def wait_for_line(folder, number: str) -> None:
    cluster.wait_until(lambda: lines(folder, number), 30, f"job {number} at work")


@pytest.mark.parametrize("kind", ["h100", "a100"])
def test_a_job_sees_the_gpus_it_asked_for(folder, kind):
    script = 'echo "$SLURMD_NODENAME $CUDA_VISIBLE_DEVICES"'
    number = submit(folder, script, f"--partition={kind}", f"--gres=gpu:{kind}:2")
    wait_for(number, "COMPLETED")
    node, devices = lines(folder, number)[0].split()
    assert cluster.NODES[node] == kind
    assert len(devices.split(",")) == 2


def test_gpus_that_no_node_has_are_refused_at_once(folder):
    with pytest.raises(cluster.Failed, match="Requested node configuration is not available"):
        submit(folder, "true", "--partition=a100", "--gres=gpu:h100:1")


def test_two_jobs_of_all_gpus_of_a_node_never_overlap(folder):
    script = "date +%s.%N; sleep 2; date +%s.%N"
    options = ("--partition=h100", "--nodelist=h100n1", "--gres=gpu:h100:8")
    numbers = [submit(folder, script, *options) for _ in range(2)]
    for number in numbers:
        wait_for(number, "COMPLETED")
    (_, end), (start, _) = sorted([float(t) for t in lines(folder, n)] for n in numbers)
    assert end < start


def test_small_jobs_share_a_node_but_no_gpu(folder):
    script = 'echo "$CUDA_VISIBLE_DEVICES"; sleep 300'
    options = ("--partition=h100", "--nodelist=h100n1", "--gres=gpu:h100:4")
    numbers = [submit(folder, script, *options) for _ in range(2)]
    for number in numbers:
        wait_for_line(folder, number)
    devices = [device for n in numbers for device in lines(folder, n)[0].split(",")]
    assert sorted(devices) == list("01234567")


def test_a_preempted_job_is_requeued_and_ends(folder):
    options = ("--nodelist=h100n1", "--gres=gpu:h100:8")
    usual = submit(folder, LONG, "--partition=h100", *options)
    wait_for_line(folder, usual)
    urgent = submit(folder, "sleep 1", "--partition=h100_urgent", *options)
    wait_for(urgent, "COMPLETED")
    assert job(usual)["state"] == "PENDING"
    wait_for(usual, "COMPLETED", REQUEUED)
    assert lines(folder, usual) == ["h100n1", "h100n1", "end"]


def test_the_job_of_a_dead_node_runs_elsewhere(folder):
    number = submit(folder, LONG, "--partition=h100", "--gres=gpu:h100:8")
    wait_for_line(folder, number)
    (dead,) = lines(folder, number)
    cluster.kill_node(dead)
    try:
        wait_for(number, "COMPLETED", REQUEUED)
    finally:
        cluster.revive_node(dead)
    (other,) = {"h100n1", "h100n2"} - {dead}
    assert lines(folder, number) == [dead, other, "end"]


def test_a_cancelled_job_says_so(folder):
    number = submit(folder, LONG, "--partition=cpu")
    wait_for_line(folder, number)
    cluster.run("scancel", number)
    wait_for(number, "CANCELLED")
