"""`serve run`, but ending as a service should: what `launch.py` runs as its child.

On Ctrl-C Serve takes HAProxy down first, and every open stream with it. Here the applications are taken down first, the
API before the models, each when its requests are finished.
"""

import signal
import sys
import time

from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.scripts import cli

_POLL_S = 0.2


def main(config_path: str) -> None:
    """Run until SIGINT."""
    try:
        # "local": never join a Ray cluster that happens to run on this machine.
        cli.main(["run", "--address", "local", "--non-blocking", config_path], standalone_mode=False)
        signal.pause()
    except KeyboardInterrupt:
        _take_down()
        serve.shutdown()


def _take_down() -> None:
    apps = serve.status().applications
    routes = _get_global_client().get_serve_details()["applications"]
    apis = [name for name in apps if routes[name].get("route_prefix")]
    for names in (apis, [name for name in apps if name not in apis]):
        _get_global_client().delete_apps(names, blocking=False)
        while serve.status().applications.keys() & set(names):
            time.sleep(_POLL_S)


if __name__ == "__main__":
    main(sys.argv[1])
