"""The processes of one model on several devices: this one leads, the others follow.

The leader runs the engine loop and samples. It tells the others over a pipe what it is about to compute, and all do it
together; what the layers exchange goes through torch.distributed (NCCL, gloo on CPUs). A follower ends when its pipe
does, so none outlives its leader; when one ends early the engine has failed.
"""

import logging
import pickle
import subprocess
import sys
import threading
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from engines.config import EngineConfig
from engines.errors import EngineError
from engines.model_loader import pick_device
from engines.parallel.messages import Message, Stop

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_TIMEOUT = timedelta(minutes=5)
"""Of what one process waits for the others; the longest is for the weights to be read."""

_END_S = 10.0


def join(config: EngineConfig, rank: int, store: TCPStore) -> None:
    """Blocks until all processes of the group have."""
    backend = "nccl" if pick_device(config.device).type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=config.tensor_parallel, timeout=_TIMEOUT)


def store_of(port: int, *, leads: bool) -> TCPStore:
    return TCPStore(_HOST, port, is_master=leads, timeout=_TIMEOUT, wait_for_workers=False)


class TensorGroup:
    """The leader's side. `tell` on one thread at a time."""

    def __init__(self, config: EngineConfig) -> None:
        """Starts the others; the group is complete when this returns."""
        self.lost = False
        self._closing = False
        store = store_of(0, leads=True)
        self._followers: list[tuple[subprocess.Popen[bytes], Connection]] = []
        try:
            for rank in range(1, config.tensor_parallel):
                self._followers.append(_start(config, rank, store.port))
            for process, connection in self._followers:
                connection.recv_bytes()  # it is about to join: who failed to come so far would be waited for in vain
                threading.Thread(target=self._watch, args=(process, connection), daemon=True).start()
            join(config, 0, store)
        except EOFError as exc:
            self.close()
            raise EngineError("A process of the model could not be started; its output says why.") from exc
        except BaseException:
            self.close()
            raise

    def tell(self, message: Message) -> None:
        """Raises `EngineError` when a follower is gone."""
        data = pickle.dumps(message)
        for _, connection in self._followers:
            try:
                connection.send_bytes(data)
            except OSError as exc:
                raise EngineError("A process of the model has ended.") from exc

    def close(self) -> None:
        self._closing = True
        for process, connection in self._followers:
            try:
                connection.send_bytes(pickle.dumps(Stop()))
            except OSError:
                logger.info("process %d of the model had ended before", process.pid)
        for process, _ in self._followers:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:  # in the middle of something that its leader has given up
                process.kill()
                process.wait()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _watch(self, process: subprocess.Popen[bytes], connection: Connection) -> None:
        try:
            reason = connection.recv_bytes().decode()
        except (EOFError, OSError):
            reason = "it ended without a word"
        if not self._closing:
            logger.error("process %d of the model is lost: %s", process.pid, reason)
            self.lost = True


def _start(config: EngineConfig, rank: int, port: int) -> tuple[subprocess.Popen[bytes], Connection]:
    mine, theirs = Pipe()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "engines.parallel.follower", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            start_new_session=True,  # a Ctrl-C is for the leader
        )
    mine.send_bytes(pickle.dumps((config, rank, port)))
    return process, mine
