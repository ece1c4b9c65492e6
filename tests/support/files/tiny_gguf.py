"""A tiny llama as a GGUF file, like the demo's: byte-level BPE of the smollm kind, tied head, permuted Q and K."""

import json
from pathlib import Path

import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from tokenizers import Tokenizer, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HEADS, KV_HEADS, LAYERS, HIDDEN, MLP, CONTEXT = 4, 2, 2, 64, 96, 256

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def tiny_vocabulary() -> tuple[list[str], list[str]]:
    """Tokens in the order of their ids, and merges, with special tokens first and merges that include spaces."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the weather in the town    and    the sea"] * 4, trainer)
    vocabulary = tokenizer.get_vocab()
    pairs = json.loads(tokenizer.to_str())["model"]["merges"]
    return sorted(vocabulary, key=vocabulary.__getitem__), [" ".join(pair) for pair in pairs]


def tiny_model(vocabulary_size: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary_size,
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.15,
    )
    return LlamaForCausalLM(config)


def write_gguf(file: Path, *, pre_tokenizer: str = "smollm") -> LlamaForCausalLM:
    """Write the file and return the model that it holds, in float32."""
    tokens, merges = tiny_vocabulary()
    model = tiny_model(len(tokens))
    writer = GGUFWriter(file, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in SPECIAL else TokenType.NORMAL for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":  # tied
            writer.add_tensor(_gguf_name(name), _permuted(name, tensor).numpy(), raw_dtype=GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _gguf_name(name: str) -> str:
    outer = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in outer:
        return outer[name]
    _, _, layer, *middle, kind = name.split(".")
    return f"blk.{layer}.{_NAMES['.'.join(middle)]}.{kind}"


def _permuted(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Q and K in the order of rotation that GGUF's llama has: pairs side by side, not halves apart."""
    heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else 0
    if not heads:
        return tensor
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, tensor.shape[1])
    return halves.transpose(1, 2).reshape(tensor.shape).contiguous()
