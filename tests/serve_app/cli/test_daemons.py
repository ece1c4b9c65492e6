"""Ray's daemons among the descendants of a process. In a process of its own: pytest is to keep its children."""

import subprocess
import sys

PROGRAM = """
import atexit, os, subprocess, sys
from serve_app.cli.daemons import Daemons
from serve_app.cli.processes import adopt_orphans, end_descendants

adopt_orphans()
atexit.register(end_descendants, 0)

# A daemon that starts a worker: until the worker executes its own program, it has the daemon's command line.
FORKS = "import os, time; pid = os.fork(); print(pid, flush=True) if pid else None; time.sleep(100)"

def start(name, code):
    child = subprocess.Popen([name, "-c", code], executable=sys.executable, stdout=subprocess.PIPE, text=True)
    return child, child.stdout.readline().strip()

assert Daemons.find() is None
raylet, worker = start("/somewhere/raylet", FORKS)
assert Daemons.find() is None
store, _ = start("/somewhere/gcs_server", "import time; print(flush=True); time.sleep(100)")
found = Daemons.find()
assert found is not None and found.pids == {"raylet": raylet.pid, "gcs_server": store.pid}, (found, worker)
os.kill(int(worker), 9)
assert found.lost() is None
raylet.kill()
raylet.wait()
assert found.lost() == "raylet", found.lost()
store.kill()
store.wait()
"""


def test_the_daemons_are_found_and_not_a_worker_that_one_of_them_is_starting():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
