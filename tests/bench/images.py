"""What images cost: in the process that prepares them, and for a service that answers them.

python tests/bench/images.py                                  # the processor alone, one thread
python tests/bench/images.py --url http://127.0.0.1:8000      # beside that, a service that `make serve` runs

prepare    images of 1 megapixel a second, decoded and resized by the demo's processor; those that it has kept
first      time to the first token of a chat with such an image: new ones, and one that was sent before
beside     gaps between the tokens of 8 text streams, alone and beside 2 clients that send new images all the time
"""

import argparse
import asyncio
import base64
import io
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from serve_app.images.prepared import ImageLimits, ImageOrder
from serve_app.images.preprocessor import Preprocessor

ROOT = Path(__file__).resolve().parents[2]
VISION = "roundhouse/tiny-vision"
TEXT = "HuggingFaceTB/SmolLM2-135M-Instruct"
SIZE = (1152, 864)  # 1 megapixel
STREAMS, TOKENS, IMAGES = 8, 64, 20


def image_url(seed: int, format: str = "JPEG") -> str:
    """A new photo-like image: smooth noise, which neither format compresses to nothing."""
    coarse = np.random.default_rng(seed).integers(0, 256, (54, 72, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(coarse).resize(SIZE, Image.Resampling.BICUBIC).save(out, format)
    return f"data:image/{format.lower()};base64," + base64.b64encode(out.getvalue()).decode()


async def prepare() -> None:
    source = str(ROOT / "cluster" / "examples" / "tiny-vision")
    preprocessor = Preprocessor(threads=1, cache_bytes=1 << 30)
    try:
        for format in ("JPEG", "PNG"):
            urls = [image_url(seed, format) for seed in range(IMAGES)]
            await preprocessor.prepare(ImageOrder(source, None, (image_url(999, format),), ImageLimits()))
            for what in ("new", "kept"):
                wall, cpu = time.perf_counter(), time.process_time()
                for url in urls:
                    await preprocessor.prepare(ImageOrder(source, None, (url,), ImageLimits()))
                wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
                rates = f"{IMAGES / wall:.0f} images/s, {IMAGES / cpu:.0f} per core"
                print(f"prepare, {format}, {what}: {rates}", flush=True)
    finally:
        preprocessor.close()


async def chat(client: httpx.AsyncClient, url: str) -> float:
    """Seconds to the first token of an answer about this image."""
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "What colour is the shape?"},
    ]
    body = {"model": VISION, "messages": [{"role": "user", "content": content}], "max_tokens": 4, "stream": True}
    began, first = time.perf_counter(), 0.0
    async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if not first and line.startswith("data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                first = time.perf_counter() - began
    return first or time.perf_counter() - began


async def gaps(client: httpx.AsyncClient, seed: int) -> list[float]:
    """Seconds between the chunks of a text stream."""
    prompt = [int(t) for t in np.random.default_rng(seed).integers(1000, 40_000, 64)]
    body = {"model": TEXT, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True}
    times: list[float] = []
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
    return [after - before for before, after in itertools.pairwise(times)]


async def texts(client: httpx.AsyncClient, first_seed: int) -> list[float]:
    found: list[float] = []
    for round_ in range(3):
        seeds = range(first_seed + round_ * STREAMS, first_seed + (round_ + 1) * STREAMS)
        for stream in await asyncio.gather(*(gaps(client, seed) for seed in seeds)):
            found += stream
    return found


async def send_images(client: httpx.AsyncClient, seeds: "itertools.count[int]", sent: list[float]) -> None:
    while True:
        sent.append(await chat(client, image_url(next(seeds))))


async def serve(url: str, key: str) -> None:
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=120) as client:
        await chat(client, image_url(1))  # starts the process that prepares images
        new = [await chat(client, image_url(seed)) for seed in range(2, 2 + IMAGES)]
        again = [await chat(client, image_url(2)) for _ in range(IMAGES)]
        print(f"first token, a new image: {shown(new)}; one sent before: {shown(again)}", flush=True)
        await texts(client, 0)
        quiet = await texts(client, 1000)
        sent: list[float] = []
        seeds = itertools.count(5000)
        senders = [asyncio.create_task(send_images(client, seeds, sent)) for _ in range(2)]
        began = time.perf_counter()
        busy = await texts(client, 2000)
        seconds = time.perf_counter() - began
        for sender in senders:
            sender.cancel()
        await asyncio.gather(*senders, return_exceptions=True)
        print(f"between tokens, alone: {shown(quiet)}; beside {len(sent) / seconds:.1f} images/s: {shown(busy)}")
        print(f"first token of these images: {shown(sent)}")
        print(f"99 % beside images against alone: {percentile(busy, 99) / percentile(quiet, 99):.2f}")


def percentile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100)[percent - 1]


def shown(values: Sequence[float]) -> str:
    return f"{statistics.median(values) * 1e3:.0f} ms (median), {percentile(values, 99) * 1e3:.0f} ms (99 %)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a service; without, the processor alone")
    parser.add_argument("--key", default="roundhouse-demo")
    options = parser.parse_args()
    asyncio.run(prepare())
    if options.url:
        asyncio.run(serve(options.url, options.key))


if __name__ == "__main__":
    main()
