"""A model from a folder, a hub id or a GGUF file, checked for what this engine can compute exactly."""

import inspect
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, GgufConfig
from transformers.distributed import DistributedConfig

from engines.attention import recurrent
from engines.interface.config import EngineConfig
from engines.interface.errors import ModelRefused
from engines.model.misfit import check_fit, odd_expert

logger = logging.getLogger(__name__)

KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"}) | recurrent.LAYER_TYPES
"""The types that this engine computes. Any other would silently be computed as one of these."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`model` is a `PreTrainedModel`. `context_length`, in tokens, is what the model was trained for.
    `takes_images`: its vision tower is used.
    """

    model: Any
    config: Any
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    context_length: int
    takes_images: bool = False


def load_model(config: EngineConfig) -> LoadedModel:
    """Raises `ModelRefused` for a source that is no model, and for layers that this engine does not support."""
    device = pick_device(config.device)
    if config.tensor_parallel > 1 and device.type == "cuda":
        device = torch.device("cuda", dist.get_rank())
    hf_config = _read_config(config)
    folder, options = _location(config)
    if "gguf_file" in options:
        # Otherwise the weights would stay packed and every layer be a class of its own.
        options["quantization_config"] = GgufConfig(dequantize=True)
    if config.tensor_parallel > 1:
        options["distributed_config"] = DistributedConfig(tp_size=config.tensor_parallel)
    dtype = _dtype(config, hf_config)
    logger.info("loading %s as %s on %s", config.source, dtype, device)
    with_images = takes_images(hf_config, config)
    try:
        loader = AutoModelForImageTextToText if with_images else AutoModelForCausalLM
        model, loading = loader.from_pretrained(
            folder, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
        check_fit(config.source, folder, loading)
        if config.tensor_parallel == 1:  # else each process' part lies on its device
            model = model.to(device)
    except UnpicklingError as exc:
        raise ModelRefused(
            f"{config.source!r} cannot be loaded: a weight file holds more than tensors, and pickled code is not run."
        ) from exc
    except (OSError, ValueError, KeyError, SafetensorError) as exc:
        raise ModelRefused(f"{config.source!r} cannot be loaded: {exc}") from exc
    except RuntimeError as exc:  # experts that do not fit together, too little memory
        raise ModelRefused(f"{config.source!r} cannot be loaded: {odd_expert(folder) or exc}") from exc
    model.eval().requires_grad_(False)
    text = model.config.get_text_config()
    return LoadedModel(model, text, device, dtype, _vocab_size(model), _context_length(text), with_images)


def takes_images(hf_config: Any, config: EngineConfig) -> bool:
    """Whether the model is served with its vision tower. An exact engine serves the text alone of a model whose image
    tokens attend to each other in both directions. Raises `ModelRefused` where transformers has no class for that.
    """
    if getattr(hf_config, "vision_config", None) is None:
        return False
    if not (config.exact and _has_whole_images(hf_config)):
        return True
    if type(hf_config) not in AutoModelForCausalLM._model_mapping:
        raise ModelRefused(f"exact is not possible for {hf_config.model_type}: it is a vision model.")
    return False


def _has_whole_images(hf_config: Any) -> bool:
    """Whether an image's tokens attend to each other in both directions: see `VisionFrontEnd.whole_images`."""
    if type(hf_config) not in AutoModelForImageTextToText._model_mapping:
        return False
    model_class = AutoModelForImageTextToText._model_mapping[type(hf_config)]
    return "token_type_ids" in inspect.signature(model_class.forward).parameters


def check_source(config: EngineConfig) -> None:
    """Checks everything about a model but its weights. Raises `ModelRefused` when it cannot be loaded."""
    if config.source.startswith("/") and not Path(config.source).exists():
        raise ModelRefused(f"The source does not exist: {config.source!r}.")
    text = _read_config(config).get_text_config()
    check_context_length(config, _context_length(text))
    folder = Path(config.source)
    if folder.is_dir():
        _check_weight_files(folder)


def check_context_length(config: EngineConfig, longest: int) -> None:
    """Raises `ModelRefused` when the configured length exceeds what the model was trained for."""
    if config.context_length is not None and config.context_length > longest:
        raise ModelRefused(
            f"context_length = {config.context_length} is more than the {longest} tokens that {config.source!r} was "
            "made for."
        )


def _read_config(config: EngineConfig) -> Any:
    folder, options = _location(config)
    try:
        hf_config = AutoConfig.from_pretrained(folder, **options)
    except (OSError, ValueError, KeyError, StrictDataclassError) as exc:
        raise ModelRefused(f"{config.source!r} cannot be loaded: {_reason(exc, config)}") from exc
    if not config.trust_remote_code:
        check_attention(hf_config)
    check_layer_types(hf_config.get_text_config())
    check_rotation(hf_config.get_text_config(), config.context_length)
    return hf_config


def _reason(exc: Exception, config: EngineConfig) -> str:
    words = " ".join(str(exc).split())
    if "trust_remote_code" in words and not config.trust_remote_code:
        return "it needs Python code that comes with it, which runs only with trust_remote_code: true"
    return words


def check_attention(hf_config: Any) -> None:
    """Raises `ModelRefused` for a model that names a hub's repository as its attention: transformers would run it."""
    for part in (hf_config, *(getattr(hf_config, name, None) for name in hf_config.sub_configs)):
        attention = getattr(part, "_attn_implementation", None)
        if isinstance(attention, str) and "/" in attention:
            raise ModelRefused(
                f"attn_implementation in config.json is {attention!r}: code from there runs only with "
                "trust_remote_code: true."
            )


def _location(config: EngineConfig) -> tuple[str, dict[str, Any]]:
    """Where transformers finds the model, and the options that say which of it."""
    folder, gguf_file = split_gguf(config.source)
    if gguf_file is not None:
        return folder, {"gguf_file": gguf_file, "trust_remote_code": config.trust_remote_code}
    return folder, {"revision": config.revision, "trust_remote_code": config.trust_remote_code}


def _check_weight_files(folder: Path) -> None:
    """All weight files are there. Those of safetensors are whole: their headers are read."""
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise ModelRefused(f"The folder {str(folder)!r} holds no weights, such as model.safetensors.")
    for index in folder.glob("*.index.json"):
        try:
            named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as exc:
            raise ModelRefused(f"{str(index)!r} is not an index of weights.") from exc
        missing = sorted(name for name in map(str, named) if not (folder / name).is_file())
        if missing:
            raise ModelRefused(f"The folder {str(folder)!r} lacks {missing[0]}, which {index.name} names.")
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="numpy"):
                pass
        except (OSError, SafetensorError) as exc:
            raise ModelRefused(f"The weights {str(file)!r} cannot be read: {exc}") from exc


def split_gguf(source: str) -> tuple[str, str | None]:
    """(folder, file name) of a `.gguf` file. Other sources, a folder or a hub id, are returned unchanged."""
    if source.endswith(".gguf"):
        path = Path(source)
        return str(path.parent), path.name
    return source, None


def pick_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def check_layer_types(text_config: Any) -> None:
    """Raises `ModelRefused` naming a layer type or attention that this engine does not compute."""
    types = set(getattr(text_config, "layer_types", None) or [])
    unknown = sorted(types - KNOWN_LAYER_TYPES)
    if unknown:
        raise ModelRefused(f"{text_config.model_type}: layers of type {unknown[0]!r} are not supported by this engine.")
    if getattr(text_config, "use_bidirectional_attention", None):
        raise ModelRefused(f"{text_config.model_type} attends in both directions; this engine serves causal models.")
    if getattr(text_config, "attention_chunk_size", None):
        raise ModelRefused(f"{text_config.model_type}: chunked attention is not supported by this engine.")


def check_rotation(text_config: Any, context_length: int | None) -> None:
    """Raises `ModelRefused` where rotary positions depend on the sequence length: in transformers the longest sequence
    of a batch would decide for all. Up to the length that the model was first trained on there is no difference.
    """
    parameters = getattr(text_config, "rope_parameters", None) or {}
    kinds = [parameters, *(kind for kind in parameters.values() if isinstance(kind, dict))]
    for kind in kinds:
        if kind.get("rope_type") in ("dynamic", "longrope"):
            limit = kind.get("original_max_position_embeddings") or text_config.max_position_embeddings
            if (context_length or text_config.max_position_embeddings) > limit:
                raise ModelRefused(
                    f"{text_config.model_type}: rotary positions of type {kind['rope_type']!r} depend on the length of "
                    f"a sequence; set context_length to at most {limit}."
                )


def _dtype(config: EngineConfig, hf_config: Any) -> torch.dtype:
    if config.exact:
        return torch.float32
    if config.dtype != "auto":
        return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[config.dtype]
    stored = getattr(hf_config.get_text_config(), "dtype", None) or getattr(hf_config, "dtype", None)
    return stored if isinstance(stored, torch.dtype) else torch.bfloat16


def _vocab_size(model: Any) -> int:
    """Rows of the embedding. A larger id would fail a whole batch."""
    return int(model.get_input_embeddings().weight.shape[0])


def _context_length(text_config: Any) -> int:
    length = getattr(text_config, "max_position_embeddings", None)
    if not isinstance(length, int) or length <= 0:
        raise ModelRefused(f"{text_config.model_type}: its configuration names no context length; set context_length.")
    return length
