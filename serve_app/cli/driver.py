"""The child process of `launch.py`: `serve run` with its own Ray cluster, and an ordered shutdown.

On Ctrl-C Serve stops HAProxy first, which breaks every open stream. Here the applications stop first, the API before
the models, each when its requests have finished.
"""

import signal
import sys
import time
import traceback

import ray
import yaml
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema
from ray.serve.scripts import cli

from serve_app.base.logs import PlainStream
from serve_app.cli.launch import RAY_DID_NOT_START
from serve_app.cli.run_folder import RunFolder

_POLL_S = 0.2
_LOOPBACK = "127.0.0.1"


def main(port: int) -> None:
    """Run until SIGINT."""
    # Output goes to a file, including the lines that Ray forwards from other processes.
    sys.stdout = PlainStream(sys.stdout.buffer, errors="backslashreplace", line_buffering=True)
    sys.stderr = PlainStream(sys.stderr.buffer, errors="backslashreplace", line_buffering=True)
    folder = RunFolder.of(port)
    try:
        _start(folder)
        signal.pause()
    except KeyboardInterrupt:
        if _serve_runs():
            _take_down()
            serve.shutdown()
        folder.dashboard.unlink(missing_ok=True)  # from here on Ray ends because it is to


def _start(folder: RunFolder) -> None:
    """Start Ray and Serve with the applications. Ends this process when one of the two does not start in time."""
    # Outside of the try: Serve would refuse it in the next try too.
    ServeDeploySchema.model_validate(yaml.safe_load(folder.config.read_text()))
    try:
        # "local": never join a Ray cluster that happens to run on this machine.
        context = ray.init(
            address="local",
            namespace="serve",
            include_dashboard=True,
            dashboard_host=_LOOPBACK,
            _temp_dir=str(folder.path),
        )
        cli.main(["run", "--non-blocking", str(folder.config)], standalone_mode=False)
    except Exception:  # Ray has no class of its own for this; a deployment that fails is a SystemExit of `serve run`
        traceback.print_exc()
        sys.exit(RAY_DID_NOT_START)
    folder.dashboard.write_text(f"http://{context.dashboard_url}")


def _serve_runs() -> bool:
    return ray.is_initialized() and _get_global_client(raise_if_no_controller_running=False) is not None


def _take_down() -> None:
    apps = serve.status().applications
    routes = _get_global_client().get_serve_details()["applications"]
    apis = [name for name in apps if routes[name].get("route_prefix")]
    for names in (apis, [name for name in apps if name not in apis]):
        _get_global_client().delete_apps(names, blocking=False)
        while serve.status().applications.keys() & set(names):
            time.sleep(_POLL_S)


if __name__ == "__main__":
    main(int(sys.argv[1]))
