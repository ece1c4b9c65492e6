"""A small byte-level tokenizer with the markers of the Qwen3 family, made in milliseconds. Nothing is downloaded."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

_CORPUS = [
    "The capital of France is Paris. It is also the largest city in France. What is the weather there?",
    "You are a helpful assistant. I need the current weather, so I will call the function.",
    '{"name": "get_weather", "arguments": {"city": "Paris"}} {"temp_c": 18}',
    "def main(): return 17 * 23  # 391, the answer to the question",
]

TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' and message.content == 'REFUSE ME' %}
        {{- raise_exception('This template refuses that message.') }}
    {%- endif %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""


def make_tokenizer(*, with_template: bool = True) -> PreTrainedTokenizerFast:
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        _CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = TEMPLATE if with_template else None
    return tokenizer


def save_model_folder(folder: Path, *, with_template: bool = True, context_length: int = 4096) -> Path:
    """What the edge reads of a model: tokenizer, template and the facts of config.json. No weights."""
    tokenizer = make_tokenizer(with_template=with_template)
    tokenizer.save_pretrained(folder)
    facts = f'{{"max_position_embeddings": {context_length}, "vocab_size": {VOCAB_SIZE}, "model_type": "qwen3"}}'
    (folder / "config.json").write_text(facts)
    endings = [tokenizer.convert_tokens_to_ids(text) for text in ("<|im_end|>", "<|endoftext|>")]
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {endings}}}')
    return folder


VOCAB_SIZE = 512  # more than the tokenizer has, as real models do
