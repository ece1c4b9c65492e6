"""What `up` runs as its child, before it starts Ray. With Ray: `tests/e2e/test_up.py`."""

import os
import subprocess
from pathlib import Path

from serve_app.cli.launch import DRIVER, RAY_DID_NOT_START
from serve_app.config.deploy import free_port


def test_a_configuration_that_serve_refuses_is_no_ray_that_did_not_start(tmp_path: Path) -> None:
    port = str(free_port())
    folder = tmp_path / f"roundhouse-{os.getuid()}" / port
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("proxy_location: Everywhere\napplications: []\n")
    done = subprocess.run(
        [*DRIVER, port],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert done.returncode not in (0, RAY_DID_NOT_START)
    assert "proxy_location" in done.stderr
    assert not list(folder.glob("session_*")), "Ray was started"
