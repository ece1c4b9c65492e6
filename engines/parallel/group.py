"""The processes of one model on several devices: this one leads, the others follow.

The leader runs the engine loop and samples. It sends each command to the others over a pipe, and all compute it
together. The layers exchange data through torch.distributed (NCCL, gloo on CPUs). A follower ends when its pipe closes,
so none outlives its leader. When a follower ends early, the engine has failed.
"""

import logging
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from engines.interface.config import EngineConfig
from engines.interface.errors import EngineError
from engines.model.loader import pick_device
from engines.parallel.messages import Message, Stop

logger = logging.getLogger(__name__)

_TIMEOUT = timedelta(minutes=5)
"""Of what one process waits for the others; the longest is for the weights to be read."""

_END_S = 10.0


def join(config: EngineConfig, rank: int, meeting_point: str) -> None:
    """Blocks until all processes of the group have joined. `meeting_point`: a file that only they can reach. torch's
    own server for this would listen to the whole network.
    """
    backend = "nccl" if pick_device(config.device).type == "cuda" else "gloo"
    store = FileStore(meeting_point, config.tensor_parallel)
    dist.init_process_group(backend, store=store, rank=rank, world_size=config.tensor_parallel, timeout=_TIMEOUT)


class TensorGroup:
    """The leader's side. Call `tell` on one thread at a time. `lost`: the group can no longer be used."""

    def __init__(self, config: EngineConfig) -> None:
        """Starts the others; the group is complete when this returns. Raises `EngineError` when one does not start."""
        self.lost = False
        self._closing = False
        self._folder = Path(tempfile.mkdtemp(prefix="roundhouse-group-"))
        self._followers: list[tuple[subprocess.Popen[bytes], Connection]] = []
        meeting_point = str(self._folder / "store")
        try:
            for rank in range(1, config.tensor_parallel):
                self._followers.append(_start())
                self._followers[-1][1].send_bytes(pickle.dumps((config, rank, meeting_point)))
            for process, connection in self._followers:
                connection.recv_bytes()  # it is about to join: `join` would wait for a process that failed before this
                threading.Thread(target=self._watch, args=(process, connection), daemon=True).start()
            join(config, 0, meeting_point)
        except (EOFError, OSError) as exc:
            self.close()
            raise EngineError("A process of the model could not be started. Its output gives the reason.") from exc
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process, _ in self._followers)

    def tell(self, message: Message) -> None:
        """Raises `EngineError` when the group is lost."""
        data = pickle.dumps(message)
        for _, connection in self._followers:
            try:
                connection.send_bytes(data)
            except OSError as exc:
                self.lost = True
                raise EngineError("A process of the model has ended.") from exc

    def close(self) -> None:
        self._closing = True
        for process, connection in self._followers:
            try:
                connection.send_bytes(pickle.dumps(Stop()))
            except OSError:
                logger.info("process %d of the model had already ended", process.pid)
        # Those of a lost group may wait for each other.
        deadline = time.monotonic() + (0.0 if self.lost else _END_S)
        for process, _ in self._followers:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:  # still busy with what its leader has abandoned
                process.kill()
                process.wait()
        if dist.is_initialized():
            dist.destroy_process_group()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _watch(self, process: subprocess.Popen[bytes], connection: Connection) -> None:
        try:
            reason = connection.recv_bytes().decode()
        except (EOFError, OSError):
            reason = "it ended without a reason"
        if not self._closing:
            logger.error("process %d of the model is lost: %s", process.pid, reason)
            self.lost = True
            _abort()


def _abort() -> None:
    """End operations that wait for a process that has ended. Gloo ends by itself; on a device they would wait for
    `_TIMEOUT`.
    """
    if dist.is_initialized() and dist.get_backend() == "nccl":
        try:
            dist.distributed_c10d._abort_process_group()
        except Exception:  # then the time-out ends them
            logger.exception("the process group could not be aborted")


def _start() -> tuple[subprocess.Popen[bytes], Connection]:
    mine, theirs = Pipe()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "engines.parallel.follower", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            start_new_session=True,  # a Ctrl-C is for the leader
        )
    return process, mine
