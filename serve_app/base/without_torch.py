"""Keeps torch out of processes that do not compute with it."""

import sys


def do_without_torch() -> None:
    """From here on `import torch` fails in this process. transformers would import it for a tokenizer or an image
    processor, which work without it. That is 130 to 270 MB. Call this before transformers is imported; once torch is
    loaded it changes nothing.
    """
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]  # as the import system's reference says it
