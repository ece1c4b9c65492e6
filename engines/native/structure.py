"""Which transformers models the C kernels compute, read off their modules."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engines.attention.interface import Attention
from engines.model.loader import LoadedModel
from engines.vision.front_end import language_path_of

_FAMILIES = ("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model", "Qwen2_5_VLTextModel", "Qwen3VLTextModel")
"""Decoders with layers that are: norm, attention, add, norm, gated SiLU, add. The self-test checks the claim."""

_AROUND_IMAGES = ("Llava", "SmolVLM", "Idefics3", "Qwen2_5_VL", "Qwen3VL")
"""Vision models that hand embeddings, positions and features for later layers to such a decoder, and nothing else. The
tests check this claim.
"""

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of a decoder layer, in the order of the C enumeration."""


class Unsupported(Exception):
    """The model is computed by transformers' own layers instead; the message says why."""


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The modules of one decoder layer."""

    linears: tuple[nn.Linear, ...]
    norm1: torch.Tensor
    norm2: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    eps: float


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """What the kernels need to know of a model. `path`: of the decoder. `norm`: the last one."""

    path: str
    layers: tuple[LayerParts, ...]
    heads: int
    kv_heads: int
    dim: int
    eps: float
    scale: float
    windows: tuple[int, ...]
    norm: torch.Tensor
    norm_eps: float
    head: nn.Linear


def read_structure(loaded: LoadedModel, attention: dict[int, Attention]) -> DecoderParts:
    """Raises `Unsupported`. `attention`: what each layer asked for when it was run."""
    model: Any = loaded.model
    base_path = (language_path_of(model) if loaded.takes_images else None) or "model"
    if loaded.device.type != "cpu" or loaded.dtype not in (torch.float32, torch.bfloat16):
        raise Unsupported(f"{loaded.dtype} on {loaded.device}")
    _require_own_classes(model, base_path)
    base: Any = model.get_submodule(base_path)
    layers = getattr(base, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) != len(attention):
        raise Unsupported("no plain list of decoder layers")
    if any(a.softcap is not None or a.sinks is not None for a in attention.values()):
        raise Unsupported("soft caps or attention sinks")
    parts = tuple(_layer_parts(layer) for layer in layers)
    head: Any = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or getattr(head, "bias", None) is not None:
        raise Unsupported("an output head that is not a plain linear layer")
    first: Any = layers[0]
    dim = int(first.self_attn.head_dim)
    found = DecoderParts(
        path=base_path,
        layers=parts,
        heads=parts[0].linears[0].out_features // dim,
        kv_heads=parts[0].linears[1].out_features // dim,
        dim=dim,
        eps=_same([part.eps for part in parts], "epsilons"),
        scale=_same([a.scale for a in attention.values()], "scales"),
        windows=tuple(attention[index].window or 0 for index in range(len(layers))),
        norm=base.norm.weight,
        norm_eps=float(base.norm.variance_epsilon),
        head=head,
    )
    _check_sizes(found)
    return found


def _require_own_classes(model: Any, base_path: str) -> None:
    """The kernels compute what transformers' classes compute. A derived class, or a replaced `forward`, may compute
    something else, which the kernels would ignore. Modules that they leave to torch may be of any class.
    """
    name, base = type(model).__name__, type(dict(model.named_modules()).get(base_path)).__name__
    around = name.removesuffix("ForConditionalGeneration") in _AROUND_IMAGES
    alone = name == base.removesuffix("Model") + "ForCausalLM"
    if base not in _FAMILIES or not (around or alone):
        raise Unsupported(f"a model of class {name}")
    for path, module in model.named_modules():
        if around and path and not path.startswith(base_path) and module is not model.get_output_embeddings():
            continue
        kind = type(module)
        if not kind.__module__.startswith(("transformers.models.", "transformers.activations", "torch.nn.modules.")):
            raise Unsupported(f"{path or 'the model'} is of class {kind.__name__}, which is not transformers' own")
        if "forward" in vars(module):
            raise Unsupported(f"{path or 'the model'} has a forward of its own")


def _layer_parts(layer: Any) -> LayerParts:
    attention, mlp = layer.self_attn, layer.mlp
    linears: list[Any] = [getattr(attention, name, None) or getattr(mlp, name, None) for name in MODULES]
    if any(type(linear) is not nn.Linear for linear in linears):
        raise Unsupported("linear layers of an unusual class")
    if any(linear.bias is not None for linear in linears[3:]):
        raise Unsupported("biases outside of q, k and v")
    if not isinstance(mlp.act_fn, nn.SiLU) and type(mlp.act_fn).__name__ != "SiLUActivation":
        raise Unsupported(f"activation {type(mlp.act_fn).__name__}")
    head_norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    norms = [layer.input_layernorm, layer.post_attention_layernorm, *filter(None, head_norms)]
    names = {name for name, _ in layer.named_children()}
    if names != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
        raise Unsupported(f"modules {sorted(names)}")
    return LayerParts(
        tuple(linears),
        layer.input_layernorm.weight,
        layer.post_attention_layernorm.weight,
        getattr(head_norms[0], "weight", None),
        getattr(head_norms[1], "weight", None),
        _same([float(norm.variance_epsilon) for norm in norms], "epsilons"),
    )


def _check_sizes(parts: DecoderParts) -> None:
    first = [linear.weight.shape for linear in parts.layers[0].linears]
    if any([linear.weight.shape for linear in layer.linears] != first for layer in parts.layers):
        raise Unsupported("layers of different sizes")
    hidden, inner = parts.layers[0].linears[0].in_features, parts.layers[0].linears[4].out_features
    for name, size in (("hidden size", hidden), ("inner size", inner), ("head size", parts.dim)):
        if size % 16:
            raise Unsupported(f"{name} {size}, not a multiple of 16")


def _same(values: list[float], what: str) -> float:
    if len(set(values)) != 1:
        raise Unsupported(f"different {what}")
    return values[0]
