"""Options and fixtures that several test files share."""

import pytest


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="also run the longer checks")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--full"):
        kept = [item for item in items if "full" not in item.keywords]
        config.hook.pytest_deselected(items=[i for i in items if "full" in i.keywords])
        items[:] = kept


@pytest.fixture(scope="module")
def one_thread():
    """Threads that wait for each other make tiny products slow on busy cores."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
