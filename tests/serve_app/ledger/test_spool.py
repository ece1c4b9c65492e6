"""What is in a spool outlives its process, belongs to one process at a time, and is left by none."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serve_app.base.errors import ConfigRefused
from serve_app.ledger.spool import Folder, Spool, abandoned
from tests.support.processes.running_up import ROOT

LINES = st.lists(st.one_of(st.binary(min_size=1, max_size=30).map(lambda b: b.replace(b"\n", b"") + b"\n"), st.none()))


def lines_of(spool: Spool) -> list[bytes]:
    return [line for segment in spool.closed() for line in segment.lines()]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(LINES, st.integers(1, 100))
def test_lines_come_back_in_their_order_whenever_segments_end(
    tmp_path: Path, lines: list[bytes | None], segment_bytes: int
) -> None:
    """None: a segment ends here."""
    spool = Spool(Spool.open(tmp_path).folder, segment_bytes)
    for line in lines:
        if line is None:
            spool.rotate()
        else:
            spool.append(line)
    written = [line for line in lines if line is not None]
    assert spool.num_bytes == sum(map(len, written))
    spool.rotate()
    assert lines_of(spool) == written
    for segment in spool.closed():
        spool.remove(segment)
    assert spool.num_bytes == 0
    spool.close()
    assert list((tmp_path / "spool").iterdir()) == []


def test_lines_that_come_while_others_are_taken_are_each_taken_once(tmp_path: Path) -> None:
    spool, taken, ended = Spool(Spool.open(tmp_path).folder, 500), [], threading.Event()

    def take() -> None:
        is_last = False
        while not is_last:
            is_last = ended.is_set()
            spool.rotate()
            for segment in spool.closed():
                taken.extend(segment.lines())
                spool.remove(segment)

    taker = threading.Thread(target=take)
    taker.start()
    lines = [b"%d\n" % number for number in range(20_000)]
    for line in lines:
        spool.append(line)
    ended.set()
    taker.join()
    assert taken == lines
    assert spool.num_bytes == 0
    spool.close()


def test_the_segment_that_is_written_is_not_among_the_closed(tmp_path: Path) -> None:
    spool = Spool.open(tmp_path)
    spool.append(b"a\n")
    assert spool.closed() == []
    spool.rotate()
    spool.append(b"b\n")
    assert lines_of(spool) == [b"a\n"]
    spool.close()


def test_a_folder_belongs_to_one_at_a_time(tmp_path: Path) -> None:
    spool = Spool.open(tmp_path)
    spool.append(b"a\n")
    assert abandoned(tmp_path / "spool") == []
    spool.close()
    (first,) = abandoned(tmp_path / "spool")
    assert abandoned(tmp_path / "spool") == []
    first.close()
    (second,) = abandoned(tmp_path / "spool")
    second.remove()
    assert list((tmp_path / "spool").iterdir()) == []


def test_what_is_no_folder_of_records_is_not_adopted(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / ".being-made").mkdir()
    (tmp_path / "cannot-be-opened" / "lock").mkdir(parents=True)
    assert abandoned(tmp_path) == []
    assert Folder.adopt(tmp_path / "not-there") is None


def test_the_files_are_for_their_owner_only(tmp_path: Path) -> None:
    spool = Spool.open(tmp_path / "ledger")
    spool.append(b"a\n")
    for path in (tmp_path / "ledger").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
    spool.close()


def test_a_folder_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigRefused, match=r"^ledger.directory must be a folder that can be written, got '.*file'"):
        Spool.open(tmp_path / "file")


FULL = """
import resource, sys
from pathlib import Path
from serve_app.ledger.spool import Spool
spool = Spool.open(Path(sys.argv[1]))
spool.append(b"1234567\\n")
resource.setrlimit(resource.RLIMIT_FSIZE, (20, 30))
spool.append(b"1234567\\n")
for _ in range(2):
    try:
        spool.append(b"1234567\\n")  # 4 bytes of it fit
    except OSError:
        print("refused", spool.num_bytes)
resource.setrlimit(resource.RLIMIT_FSIZE, (30, 30))
spool.append(b"7654321\\n")
spool.close()
"""


def test_a_line_that_fits_in_part_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FULL, tmp_path], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["refused 16", "refused 16", ""]
    (folder,) = abandoned(tmp_path / "spool")
    assert [line for one in folder.segments() for line in one.lines()] == [b"1234567\n", b"1234567\n", b"7654321\n"]
    folder.remove()


def test_a_full_disk_is_an_error_and_the_next_line_is_written(tmp_path: Path) -> None:
    spool = Spool.open(tmp_path)
    (spool.folder.path / "00000001.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        spool.append(b"a\n")
    assert spool.num_bytes == 0
    spool.rotate()
    spool.append(b"b\n")
    assert spool.num_bytes == 2
    spool.rotate()
    (spool.folder.path / "00000001.jsonl").unlink()
    assert lines_of(spool) == [b"b\n"]
    spool.close()


KILLED = """
import os, sys
from pathlib import Path
from serve_app.ledger.spool import Spool
spool = Spool.open(Path(sys.argv[1]))
for number in range(1000):
    spool.append(b"%d\\n" % number)
os.kill(os.getpid(), 9)
"""


def test_a_killed_process_leaves_every_line(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    (folder,) = abandoned(tmp_path / "spool")
    assert [int(line) for segment in folder.segments() for line in segment.lines()] == list(range(1000))
    folder.remove()


def test_a_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    spool = Spool.open(tmp_path)
    spool.append(b"a\n")
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    spool.close()
    found = abandoned(tmp_path / "spool")
    child.communicate(b"\n")
    assert len(found) == 1
    found[0].remove()
    assert os.listdir(tmp_path / "spool") == []
