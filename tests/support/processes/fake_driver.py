"""Stands in for `serve_app.cli.driver` where `up` itself is tested: processes, a port and files as Ray's, without Ray.

    python -m tests.support.processes.fake_driver NAME ... PORT

`ray-fails-N`: its first N starts fail as Ray's do on a busy machine; `ignores-sigint`: it does not end when asked to.
"""

import http.server
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

from serve_app.cli.launch import RAY_DID_NOT_START
from serve_app.cli.run_folder import RunFolder

DASHBOARD = "http://127.0.0.1:8265"
REASON = "The current node timed out during startup."


class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def main(traits: list[str], port: int) -> None:
    folder = RunFolder.of(port)
    failures = next((int(trait.rpartition("-")[2]) for trait in traits if trait.startswith("ray-fails-")), 0)
    print("Starting Ray", flush=True)
    if folder.log.read_text().count("Starting Ray") <= failures:
        print(f"Traceback (most recent call last):\n  ...\nException: {REASON}", flush=True)
        sys.exit(RAY_DID_NOT_START)
    signal.signal(signal.SIGINT, signal.SIG_IGN if "ignores-sigint" in traits else lambda *_: sys.exit(0))
    for name in ("gcs_server", "raylet"):
        executable = Path(folder.path) / name
        executable.unlink(missing_ok=True)
        executable.symlink_to(shutil.which("sleep") or "sleep")
        subprocess.Popen([executable, "600"])
    folder.dashboard.write_text(DASHBOARD)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Ready)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while True:
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1:-1], int(sys.argv[-1]))
