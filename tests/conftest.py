"""What holds for all tests: Triton without a device, the order of the files, and which worker runs them."""

import gc
import os
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from tests.support.processes.ray_environment import set_ray_environment

set_ray_environment()  # before a test module imports Ray
if not Path("/dev/nvidiactl").exists():
    # Before Triton is imported: without a device its kernels run in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The other worker may hold both cores for a second, so a time says nothing about an example.
settings.register_profile("shared cores", deadline=None)
settings.load_profile("shared cores")

E2E = "tests/e2e/"
OWN_RAY = "tests/e2e/test_up"  # files that start `serve_app up`, each a Ray of its own
# Minutes each: begun first, so that no worker is left alone with one of them at the end.
LONGEST = ("tests/cluster/test_demo_service.py", E2E)


class ByFile(LoadFileScheduling):
    """A file's tests run in one worker, in their order. All that share the Ray of `e2e/conftest.py` run in one too."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return E2E if file.startswith(E2E) and not file.startswith(OWN_RAY) else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByFile:
    config.option.loadscopereorder = False  # the order is that of the collection
    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))  # stable


def pytest_collection_finish() -> None:
    """The modules of a thousand tests, torch and transformers are a million objects that never go away: each full
    collection would look at them all, for half a second.
    """
    gc.collect()
    gc.freeze()
