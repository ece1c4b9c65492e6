"""What holds for all tests."""

import gc


def pytest_collection_finish() -> None:
    """The modules of a thousand tests, torch and transformers are a million objects that never go away: each full
    collection would look at them all, for half a second.
    """
    gc.collect()
    gc.freeze()
