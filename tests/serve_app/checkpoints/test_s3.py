"""Checkpoints in a real object store's protocol. Needs the packages s3fs and moto; left out without them."""

import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from engines.lora.format.digest import CONFIG_FILE, WEIGHTS_FILE
from serve_app.base.errors import CheckpointIncomplete, CheckpointNotFound, CheckpointUnavailable
from tests.support.files.checkpoint_files import PATH, config, digest, files, opened_store, run, tar_bytes, weights

pytest.importorskip("s3fs")
moto_server = pytest.importorskip("moto.server")
boto3 = pytest.importorskip("boto3")

KEY = f"runs/{PATH.run}/sampler_weights/{PATH.name}"


class Bucket:
    """An empty bucket of its own."""

    def __init__(self) -> None:
        self._name = f"bucket-{uuid.uuid4().hex}"
        self._client = boto3.client("s3")
        self._client.create_bucket(Bucket=self._name)
        self.root = f"s3://{self._name}/runs"

    def put(self, contents: Mapping[str, bytes]) -> None:
        for name, content in contents.items():
            self._client.put_object(Bucket=self._name, Key=KEY + name, Body=content)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    try:
        yield Bucket()
    finally:
        server.stop()


def _in_folder(contents: Mapping[str, bytes]) -> dict[str, bytes]:
    return {f"/{name}": content for name, content in contents.items()}


def test_a_bucket_is_a_root(s3: Bucket, tmp_path: Path) -> None:
    with opened_store(s3.root, cache=tmp_path, recheck_s=0.0) as store:
        with pytest.raises(CheckpointNotFound):
            run(lambda: store.resolve(PATH))
        s3.put(_in_folder({CONFIG_FILE: config()}))
        with pytest.raises(CheckpointIncomplete):
            run(lambda: store.resolve(PATH))
        s3.put(_in_folder(files(1, metadata={"owner": "alice"})))
        for _ in range(3):
            found = run(lambda: store.resolve(PATH))
            assert (found.digest, found.owner) == (digest(files(1)), "alice")
        assert store.counters.fetches == 1
        s3.put(_in_folder({WEIGHTS_FILE: weights(2)}))
        assert run(lambda: store.resolve(PATH)).digest == digest(files(2))
        assert run(lambda: store.list("alice")).paths == (PATH,)
        assert run(lambda: store.list("robin")).paths == ()


def test_a_large_checkpoint_comes_whole(s3: Bucket, tmp_path: Path) -> None:
    large = {CONFIG_FILE: config(), WEIGHTS_FILE: weights(3, 12 << 20)}
    s3.put(_in_folder(large))
    with opened_store(s3.root, cache=tmp_path) as store:
        found = run(lambda: store.resolve(PATH))
    assert found.digest == digest(large)
    assert os.path.getsize(Path(found.directory) / WEIGHTS_FILE) == len(large[WEIGHTS_FILE])


def test_a_tar_in_a_bucket(s3: Bucket, tmp_path: Path) -> None:
    s3.put({".tar": tar_bytes(files())})
    with opened_store(s3.root, cache=tmp_path) as store:
        assert run(lambda: store.resolve(PATH)).digest == digest(files())


def test_a_bucket_that_is_not_there_is_no_checkpoint(s3: Bucket, tmp_path: Path) -> None:
    with (
        opened_store("s3://none/runs", cache=tmp_path) as store,
        pytest.raises((CheckpointNotFound, CheckpointUnavailable)),
    ):
        run(lambda: store.resolve(PATH))
