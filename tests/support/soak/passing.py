"""Checkpoints that come and go while they are asked for."""

import json
import shutil
import tempfile
from collections import deque
from pathlib import Path
from random import Random

from engines.lora.format.digest import CONFIG_FILE, WEIGHTS_FILE

RUN = "soak"


class PassingCheckpoints:
    """At most `most` of them in a root of the service, each with other content. `close` removes them all.

    A checkpoint appears and disappears with one rename, as a trainer's upload does.
    """

    def __init__(self, root: Path, template: Path, base: str, *, most: int = 6) -> None:
        """`template`: the folder of an adapter of the model `base`."""
        self._folder = root / RUN / "sampler_weights"
        self._folder.mkdir(parents=True)
        self._aside = Path(tempfile.mkdtemp(prefix="soak-", dir=root.parent))  # a rename stays on one disk
        self._template = template
        self._base = base
        self._most = most
        self._made = 0
        self._here: deque[str] = deque()
        self._known: deque[str] = deque(maxlen=most + 2)  # the last two of them may be gone

    def pass_on(self) -> None:
        """One more comes; the oldest goes once there are too many."""
        name = f"{self._made:06d}"
        self._made += 1
        made = self._aside / name
        made.mkdir()
        config = json.loads((self._template / CONFIG_FILE).read_text())
        # Of no effect on a reply, but other content for every cache.
        (made / CONFIG_FILE).write_text(json.dumps({**config, "lora_dropout": self._made / 1_000_000}))
        shutil.copyfile(self._template / WEIGHTS_FILE, made / WEIGHTS_FILE)
        (made / "checkpoint.json").write_text(json.dumps({"base_model": self._base, "public": True}))
        made.rename(self._folder / name)
        self._here.append(name)
        self._known.append(name)
        if len(self._here) > self._most:
            gone = self._here.popleft()
            (self._folder / gone).rename(self._aside / gone)
            shutil.rmtree(self._aside / gone)

    def name(self, chance: Random) -> str:
        """Of one that is here, or was until a moment ago."""
        return f"tinker://{RUN}/sampler_weights/{chance.choice(self._known)}"

    def close(self) -> None:
        shutil.rmtree(self._folder.parent)
        shutil.rmtree(self._aside)
