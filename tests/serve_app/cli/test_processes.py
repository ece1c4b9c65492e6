"""Ending all that was started, and nothing else. In processes of their own: pytest is to keep its children."""

import subprocess
import sys
import textwrap

BEFORE = """
import os, signal, subprocess, sys, time
from serve_app.cli.processes import adopt_orphans, command_line, descendants, end_descendants

def start(code):
    child = subprocess.Popen([sys.executable, "-c", "import os, signal, sys, time\\n" + code], stdout=subprocess.PIPE)
    child.stdout.readline()
    return child
"""

SLEEPER = "print(flush=True); time.sleep(100)"
STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEPER
# Forks twice and ends: its grandchild has no parent any more, and a session of its own.
DAEMON = (
    "pid = os.fork()\\nif pid: os.waitpid(pid, 0); sys.exit()\\nos.setsid()\\nif os.fork(): os._exit(0)\\n" + SLEEPER
)


def run(code: str) -> str:
    program = BEFORE + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_children_and_their_children_are_ended():
    assert (
        run(f"""
        inner = 'import subprocess; subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]); {SLEEPER}'
        start(inner)
        assert len(descendants()) == 2
        end_descendants(5)
        print(descendants())
    """)
        == "[]"
    )


def test_a_daemon_that_left_its_parent_is_ended_too():
    assert (
        run(f"""
        adopt_orphans()
        start("{DAEMON}")
        assert len(descendants()) >= 1
        end_descendants(5)
        print(descendants())
    """)
        == "[]"
    )


def test_what_does_not_want_to_end_is_killed_when_its_time_is_up():
    assert (
        run(f"""
        start("{STUBBORN}")
        started = time.monotonic()
        end_descendants(0.5)
        assert 0.4 < time.monotonic() - started < 10
        print(descendants())
    """)
        == "[]"
    )


def test_nobody_elses_process_is_touched():
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    run("end_descendants(1)")
    assert other.poll() is None
    other.kill()
    other.wait()


def test_command_lines_are_read_and_empty_for_who_is_gone():
    assert (
        run(f"""
        child = start("{SLEEPER}")
        assert "-c" in command_line(child.pid)
        end_descendants(5)
        child.wait()
        print(command_line(child.pid))
    """)
        == "[]"
    )
