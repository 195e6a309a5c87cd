"""Options and fixtures that several test files share."""


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="also run the longer checks")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--full"):
        kept = [item for item in items if "full" not in item.keywords]
        config.hook.pytest_deselected(items=[i for i in items if "full" in i.keywords])
        items[:] = kept
