"""Options and fixtures that several test files share."""

import os

import pytest


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="also run the longer checks")
    parser.addoption("--slurm", action="store_true", help="run the checks on a real Slurm instead")


def pytest_collection_modifyitems(config, items):
    slurm, full = config.getoption("--slurm"), config.getoption("--full")
    kept = [
        item for item in items
        if bool(item.get_closest_marker("slurm")) == slurm
        and (full or not item.get_closest_marker("full"))
    ]  # fmt: skip
    config.hook.pytest_deselected(items=[i for i in items if i not in kept])
    items[:] = kept


@pytest.fixture(scope="module")
def one_thread():
    """Threads that wait for each other make tiny products slow on busy cores."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """A running test Slurm, and a folder for what its jobs write."""
    import cluster

    base = tmp_path_factory.mktemp("jobs")
    try:
        with cluster.running(base / "slurm"):
            yield base
    except cluster.Skipped as reason:
        # CI, which sets the variable, has to run these tests; a developer's machine may not.
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(reason))


@pytest.fixture
def no_jobs_left(slurm):
    """Whatever a test submitted is cancelled after it."""
    import cluster

    yield
    cluster.cancel_all()
