"""A process that computes its part of a model, as its leader tells it. `group.TensorGroup` runs it as a program."""

import logging
import os
import pickle
import sys
import threading
from multiprocessing.connection import Connection
from queue import SimpleQueue

import torch

from engines.compute.assembly import AssembledModel, assemble_model
from engines.interface.config import EngineConfig
from engines.lora.apply import AdapterModules
from engines.parallel.group import join
from engines.parallel.messages import CheckHealth, Encode, Install, Message, Remove, Stop

logger = logging.getLogger(__name__)


def follow(model: AssembledModel, inbox: "SimpleQueue[Message]") -> None:
    """Do what the leader does, until it says stop. An exception ends this process and with it the group: processes that
    were in the same sum have different numbers by then.
    """
    modules = model.runner.adapters
    assert isinstance(modules, AdapterModules)
    while True:
        message = inbox.get()
        if isinstance(message, Stop):
            return
        if isinstance(message, Install):
            modules.install(message.slot, modules.prepare(pickle.loads(message.weights)))
        elif isinstance(message, Remove):
            modules.remove(message.slot)
        elif isinstance(message, CheckHealth):
            model.runner.check_health()
        elif isinstance(message, Encode):
            model.runner.model.encode_with(list(message.token_ids), message.tensors)
        else:
            chunks = [chunk.chunk(number) for number, chunk in enumerate(message.chunks)]
            model.runner.run(model.runner.lay_out(chunks, message.images))


def _read(connection: Connection, inbox: "SimpleQueue[Message]") -> None:
    try:
        while True:
            inbox.put(pickle.loads(connection.recv_bytes()))
    except (EOFError, OSError):
        os._exit(0)  # the leader is gone, and the main thread may wait for it for ever
    except BaseException:
        logger.exception("a message cannot be read")
        os._exit(1)


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    config: EngineConfig
    config, rank, meeting_point = pickle.loads(connection.recv_bytes())
    logging.basicConfig(level=logging.WARNING, format=f"%(asctime)s process {rank} of the model: %(message)s")
    inbox: SimpleQueue[Message] = SimpleQueue()
    threading.Thread(target=_read, args=(connection, inbox), daemon=True).start()
    os.environ["LOCAL_RANK"] = str(rank)  # noqa: TID251  (transformers takes a process' device from it)
    try:
        connection.send_bytes(b"joining")
        join(config, rank, meeting_point)
        with torch.inference_mode():
            follow(assemble_model(config), inbox)
    except Exception as exc:
        logger.exception("failed")
        connection.send_bytes(f"{type(exc).__name__}: {exc}".encode())
        os._exit(1)
    os._exit(0)  # the leader ends the rest of the group


if __name__ == "__main__":
    main()
