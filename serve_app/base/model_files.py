"""The JSON files of a base model, in its folder or hub repository."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serve_app.base.errors import ConfigRefused


def read_json(source: str, name: str, revision: str | None) -> Mapping[str, Any]:
    """One of them; empty if the model has none of this name. `source`: a folder, a `.gguf` file or a hub id.

    Raises `ConfigRefused`.
    """
    # Imported here: it takes seconds, and most of what imports this never reads a model.
    from transformers.utils import cached_file

    if source.endswith(".gguf"):
        return {}
    try:
        found = cached_file(source, name, revision=revision, _raise_exceptions_for_missing_entries=False)
    except OSError as exc:
        raise ConfigRefused(f"The model {source!r} cannot be found.") from exc
    if found is None:
        return {}
    try:
        parsed = json.loads(Path(found).read_text(encoding="utf-8"))
    except ValueError as exc:
        raise ConfigRefused(f"The file {name!r} of the model {source!r} is not JSON: {exc}.") from exc
    return parsed if isinstance(parsed, dict) else {}
