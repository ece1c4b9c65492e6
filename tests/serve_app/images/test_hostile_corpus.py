"""Pillow's own test images, bombs, crashes and time-outs of the past among them: each is decoded to RGB or refused, in
bounded time and memory. They come from Pillow's source archive, which is fetched once.
"""

import json
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support.readme_blocks import ROOT

_CACHE = ROOT / ".cache" / "pillow"
_MAX_CPU_S, _MAX_BYTES = 2.0, 512 << 20

_DECODE = """
import json, re, sys, time
from pathlib import Path
from serve_app.images.decode import ImageRefused, decode
from serve_app.images.prepared import ImageLimits

found = {}
for path in sorted(Path(sys.argv[1]).rglob("*")):
    if path.is_file():
        began = time.process_time()
        try:
            outcome = decode(path.read_bytes(), ImageLimits()).mode
        except ImageRefused as exc:
            outcome = str(exc)
        found[str(path)] = outcome, time.process_time() - began
# getrusage tells the parent's peak too.
peak_kb = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]
print(json.dumps([found, int(peak_kb) * 1024]))
"""


@pytest.fixture(scope="module")
def corpus() -> Path:
    pinned = version("pillow")
    folder = _CACHE / f"pillow-{pinned}"
    if not folder.is_dir():
        _CACHE.mkdir(parents=True, exist_ok=True)
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*fetch, "--dest", str(_CACHE), f"pillow=={pinned}"], check=True)
        with tarfile.open(_CACHE / f"pillow-{pinned}.tar.gz") as archive:
            members = [member for member in archive if "/Tests/images/" in member.name]
            archive.extractall(_CACHE, members, filter="data")
    return folder


@pytest.mark.slow
def test_every_image_is_decoded_or_refused_in_bounded_time_and_memory(corpus: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _DECODE, str(corpus)],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    found, peak_bytes = json.loads(done.stdout)
    assert len(found) > 1000
    outcomes = [outcome for outcome, _ in found.values()]
    assert outcomes.count("RGB") > 400
    assert all(o == "RGB" or o.startswith(("must ", "is damaged")) for o in outcomes)
    slow = {path: cpu_s for path, (_, cpu_s) in found.items() if cpu_s > _MAX_CPU_S}
    assert slow == {}
    assert peak_bytes < _MAX_BYTES
