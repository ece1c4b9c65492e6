"""The environment that `make setup` makes, without an installation: links to packages of the one that runs the tests.

It holds the distributions that pip would install, and no other: what the tests need besides is not there.
"""

import re
import subprocess
import sysconfig
import tomllib
import venv
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.readme_blocks import ROOT, environment


def make_environment(folder: Path) -> Path:
    """The path of its interpreter. The project itself is found from the checkout's folder, as with `pip install -e`."""
    venv.create(folder, with_pip=False, symlinks=True)
    there = {"base": str(folder), "platbase": str(folder)}
    packages = Path(sysconfig.get_path("purelib", "venv", vars=there))
    installed = {canonicalize_name(one.name): one for one in metadata.distributions()}
    wanted = set(_closure(installed))
    owners = Counter(top for one in installed.values() for top in _tops(one))
    shared = {top for top, count in owners.items() if count > 1}
    for name in wanted:
        for file in installed[name].files or ():
            top = file.parts[0]
            if top in ("..", "__pycache__"):  # scripts, and what Python makes itself
                continue
            link = packages / (file if top in shared else top)
            if not link.exists():
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(installed[name].locate_file(file if top in shared else PurePosixPath(top)))
    return folder / "bin" / "python"


def _tops(distribution: metadata.Distribution) -> set[str]:
    return {file.parts[0] for file in distribution.files or ()}


def _closure(installed: dict[str, metadata.Distribution]) -> Iterator[str]:
    """What `pip install` of the project with the extra of `make setup` brings."""
    todo = list(_required())
    seen: set[tuple[str, str]] = set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *sorted(requirement.extras)):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            for text in installed[name].requires or ():
                needed = Requirement(text)
                if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                    todo.append(needed)
        yield name


def _required() -> Iterator[Requirement]:
    """Those of the project, from the file itself: what is installed may be older."""
    plan = subprocess.run(
        ["make", "--dry-run", "setup", "VENV=nowhere"],
        cwd=ROOT,
        env=environment(),
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    (extras,) = re.findall(r"install .* -e '\.\[(.*)\]'", plan)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *project["optional-dependencies"][extras]]
    for requirement in map(Requirement, texts):
        if requirement.marker is None or requirement.marker.evaluate():
            yield requirement
