"""Model folders whose files ask for Python code of their own to be run. The code leaves a file behind when it is."""

import json
from pathlib import Path
from typing import Any

import torch

CODE = "evil.Evil"
AUTO_MAP = {
    "AutoConfig": CODE,
    "AutoModelForCausalLM": CODE,
    "AutoModelForImageTextToText": CODE,
    "AutoTokenizer": [CODE, CODE],
    "AutoImageProcessor": CODE,
    "AutoProcessor": CODE,
}


class Trap:
    """Code beside a model, in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._trace = folder / "it-ran"
        (folder / "evil.py").write_text(f"open({str(self._trace)!r}, 'w').close()\nclass Evil: pass\n")

    @property
    def sprung(self) -> bool:
        """Whether any of the code has run."""
        return self._trace.exists()

    def edit(self, name: str, **fields: Any) -> None:
        """Set fields of one of the model's JSON files, which need not exist."""
        path = self._folder / name
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(before | fields))

    def pickle_weights(self) -> None:
        """Replace the weights by a file that runs code when it is unpickled without care."""
        for path in self._folder.glob("*.safetensors"):
            path.unlink()
        torch.save({"weight": _Pickled(str(self._trace))}, self._folder / "pytorch_model.bin")


class _Pickled:
    def __init__(self, trace: str) -> None:
        self._trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self._trace, "w")
