"""The checkpoints that the demo ships: whole, small, and saying what the README promises."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from demo_modules import prepare_demo
from safetensors import safe_open

BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
# In and out of every linear layer of the base.
FEATURES = {
    "q_proj": (576, 576),
    "k_proj": (576, 192),
    "v_proj": (576, 192),
    "o_proj": (576, 576),
    "gate_proj": (576, 1536),
    "up_proj": (576, 1536),
    "down_proj": (1536, 576),
}
shipped = pytest.mark.parametrize("name", ["quill", "tools"])


def folder_of(name: str) -> Path:
    return Path(prepare_demo.SHIPPED_CHECKPOINTS) / name


@shipped
def test_a_shipped_checkpoint_has_at_most_two_megabytes(name: str) -> None:
    assert 0 < sum(file.stat().st_size for file in folder_of(name).iterdir()) <= 2_000_000


@shipped
def test_a_shipped_checkpoint_names_its_base_and_the_digests_of_its_files(name: str) -> None:
    facts = json.loads((folder_of(name) / "checkpoint.json").read_text())
    config = json.loads((folder_of(name) / "adapter_config.json").read_text())
    assert (facts["base_model"], facts["public"], config["base_model_name_or_path"]) == (BASE, True, BASE)
    others = {file.name for file in folder_of(name).iterdir()} - {"checkpoint.json"}
    assert facts["sha256"] == {
        file: hashlib.sha256((folder_of(name) / file).read_bytes()).hexdigest() for file in sorted(others)
    }


@shipped
def test_a_shipped_checkpoint_adapts_every_linear_layer_of_the_base(name: str) -> None:
    rank = json.loads((folder_of(name) / "adapter_config.json").read_text())["r"]
    with safe_open(folder_of(name) / "adapter_model.safetensors", "pt") as file:
        shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        dtypes = {file.get_slice(key).get_dtype() for key in shapes}
    wanted: dict[str, tuple[int, int]] = {}
    for layer in range(30):
        for module, (inputs, outputs) in FEATURES.items():
            block = "self_attn" if module[0] in "qkvo" else "mlp"
            prefix = f"base_model.model.model.layers.{layer}.{block}.{module}.lora_"
            wanted |= {f"{prefix}A.weight": (rank, inputs), f"{prefix}B.weight": (outputs, rank)}
    assert shapes == wanted
    assert dtypes == {"BF16"}


def test_the_store_is_filled_with_the_shipped_files_and_mended(tmp_path: Path) -> None:
    prepare_demo.fill_store(tmp_path)
    weights = tmp_path / "demo" / "sampler_weights" / "quill" / "adapter_model.safetensors"
    before = weights.stat().st_ino
    prepare_demo.fill_store(tmp_path)
    assert weights.stat().st_ino == before
    weights.write_bytes(b"cut off")
    prepare_demo.fill_store(tmp_path)
    for name in ("quill", "tools"):
        place = tmp_path / "demo" / "sampler_weights" / name
        assert {file.name: file.read_bytes() for file in place.iterdir()} == {
            file.name: file.read_bytes() for file in folder_of(name).iterdir()
        }
    assert sorted(path.name for path in (tmp_path / "demo" / "sampler_weights").iterdir()) == ["quill", "tools"]


def test_a_copy_that_fails_leaves_the_store_as_it_was(tmp_path: Path) -> None:
    source = tmp_path / "shipped"
    shutil.copytree(folder_of("quill"), source / "quill")
    (source / "quill" / "adapter_model.safetensors").unlink()
    (source / "quill" / "adapter_model.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(shutil.Error):
        prepare_demo.fill_store(tmp_path / "store", source)
    assert list((tmp_path / "store" / "demo" / "sampler_weights").iterdir()) == []
