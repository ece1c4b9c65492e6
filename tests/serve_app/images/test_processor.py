"""What the model's own processor of transformers makes of an image, without the parts that need torchvision."""

import io
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, AutoTokenizer

from engines.interface.protocol import BFLOAT16, HostTensor
from serve_app.base.errors import ConfigRefused
from serve_app.images.decode import ImageRefused
from serve_app.images.prepared import PreparedImage
from serve_app.images.processor import ModelProcessor
from tests.support.files.hostile_model import AUTO_MAP, Trap
from tests.support.files.tiny_tokenizer import save_model_folder
from tests.support.readme_blocks import ROOT

QWEN = str(ROOT / "cluster" / "examples" / "tiny-vision")
LLAVA = str(ROOT / "tests" / "support" / "models" / "tiny-llava")


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8))


def arrays(image: PreparedImage) -> dict[str, np.ndarray]:
    return {name: array(tensor) for name, tensor in image.tensors.items()}


def array(tensor: HostTensor) -> np.ndarray:
    if tensor.dtype != BFLOAT16:
        return np.frombuffer(tensor.data, dtype=tensor.dtype).reshape(tensor.shape)
    return torch.frombuffer(bytearray(tensor.data), dtype=torch.bfloat16).view(tensor.shape).float().numpy()


@pytest.mark.parametrize("size", [(64, 64), (300, 200), (200, 300), (1, 1), (640, 30)])
def test_tensors_and_tokens_are_those_of_the_models_whole_processor(size: tuple[int, int]) -> None:
    image = noise(*size)
    prepared = ModelProcessor(LLAVA).prepare(image)
    whole = AutoProcessor.from_pretrained(LLAVA)(images=[image], text="<image>", return_tensors="np")
    assert prepared.token_ids == tuple(whole["input_ids"][0])
    found = arrays(prepared)
    assert found.keys() == {"pixel_values"}
    rounded = torch.from_numpy(whole["pixel_values"]).bfloat16().float().numpy()
    assert np.array_equal(found["pixel_values"], rounded), "the model's weights are bfloat16: so is what it gets"


def test_an_image_has_as_many_tokens_as_its_grid_has_merged_patches() -> None:
    prepared = ModelProcessor(QWEN).prepare(noise(300, 200))
    grid = arrays(prepared)["image_grid_thw"]
    pad = AutoTokenizer.from_pretrained(QWEN).convert_tokens_to_ids("<|image_pad|>")
    assert prepared.token_ids == (pad,) * int(grid.prod() // 4)
    assert arrays(prepared)["pixel_values"].shape == (int(grid.prod()), 3 * 2 * 8 * 8)


def test_equal_pixels_have_one_digest_and_others_another() -> None:
    processor = ModelProcessor(QWEN)
    first, again, other = (processor.prepare(noise(*size)) for size in ((64, 64), (64, 64), (72, 64)))
    assert first == again
    assert first.digest != other.digest


def test_the_frame_is_what_the_chat_template_writes_around_an_image() -> None:
    ids = AutoTokenizer.from_pretrained(QWEN).convert_tokens_to_ids
    frame = ModelProcessor(QWEN).frame
    assert (frame.placeholder_id, frame.start_id, frame.end_id) == tuple(
        ids(token) for token in ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
    )
    assert ModelProcessor(LLAVA).frame.start_id is None


def test_a_shape_that_the_model_cannot_take_is_refused() -> None:
    with pytest.raises(ImageRefused, match=r"has a shape that this model does not accept: 1 x 3000 pixels"):
        ModelProcessor(QWEN).prepare(noise(1, 3000))


def test_a_model_without_an_image_processor_is_refused(tmp_path: Path) -> None:
    folder = save_model_folder(tmp_path / "text")
    with pytest.raises(ConfigRefused, match="transformers has no image processor for the model"):
        ModelProcessor(str(folder))
    with pytest.raises(ConfigRefused, match="cannot be found"):
        ModelProcessor(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("file", ["config.json", "preprocessor_config.json", "processor_config.json"])
def test_no_code_that_comes_with_a_model_is_run(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 20))  # to whoever asks whether to run it
    trap = Trap(shutil.copytree(LLAVA, tmp_path / "llava"))
    trap.edit("tokenizer_config.json", auto_map=AUTO_MAP)
    trap.edit(file, auto_map=AUTO_MAP)
    assert ModelProcessor(str(tmp_path / "llava")).frame == ModelProcessor(LLAVA).frame
    assert not trap.sprung


@pytest.mark.parametrize("name", ["Evil", "AutoModelForCausalLM", "pipeline", "utils", "PreTrainedModel", "__doc__"])
def test_a_processor_class_that_is_no_processor_of_transformers_is_refused(name: str, tmp_path: Path) -> None:
    trap = Trap(shutil.copytree(LLAVA, tmp_path / "llava"))
    trap.edit("processor_config.json", processor_class=name, auto_map=AUTO_MAP)
    with pytest.raises(ConfigRefused, match="transformers has no image processor for the model"):
        ModelProcessor(str(tmp_path / "llava"))
    assert not trap.sprung


def test_an_image_processor_of_the_model_s_own_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 20))
    trap = Trap(shutil.copytree(LLAVA, tmp_path / "llava"))
    trap.edit("config.json", model_type="evil", auto_map=AUTO_MAP)
    trap.edit("processor_config.json", image_processor={"image_processor_type": "Evil", "auto_map": AUTO_MAP})
    with pytest.raises(ConfigRefused, match=r"The image processor of the model .* cannot be loaded"):
        ModelProcessor(str(tmp_path / "llava"))
    assert not trap.sprung
