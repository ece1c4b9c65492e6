"""An adapter's identity: the digest of its content. Imports no torch, so that the service can compute it too."""

from hashlib import sha256
from typing import Final

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
PICKLE_FILE: Final = "adapter_model.bin"  # never read, even beside other files
MAX_CONFIG_BYTES: Final = 1 << 20

Buffer = bytes | bytearray | memoryview


def adapter_digest(config: Buffer, weights: Buffer) -> str:
    """64 hex digits for the bytes of `adapter_config.json` and `adapter_model.safetensors`."""
    return combined_digest(sha256(config).digest(), sha256(weights).digest())


def combined_digest(config_sha256: bytes, weights_sha256: bytes) -> str:
    """The same digest, from the SHA-256 of each file, 32 bytes each. For callers that hash a file without holding it in
    memory.

    Because it is a digest of digests, no byte can move from one file to the other unnoticed. A checkpoint that lists
    the SHA-256 of its files is verified in the same pass.
    """
    assert len(config_sha256) == len(weights_sha256) == 32
    return sha256(b"roundhouse lora 1\n" + config_sha256 + weights_sha256).hexdigest()
