"""Images and tokenizers are the same in a process that does without torch."""

import subprocess
import sys
import textwrap

from PIL import Image

from serve_app.catalog.served_model import load_model
from serve_app.config.catalog_entry import ModelConfig
from serve_app.images.processor import ModelProcessor
from tests.support.readme_blocks import ROOT

MODELS = ("cluster/examples/tiny-vision", "tests/support/models/tiny-llava")


def without_torch(program: str) -> str:
    """What a program prints that first does without torch."""
    begin = "from serve_app.base.without_torch import do_without_torch\ndo_without_torch()\n"
    command = [sys.executable, "-c", begin + textwrap.dedent(program)]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_images_are_prepared_to_the_same_bits() -> None:
    printed = without_torch(f"""
        import sys
        from PIL import Image
        from serve_app.images.preprocessor import Preprocessor
        from serve_app.images.processor import ModelProcessor

        image = Image.radial_gradient("L").convert("RGB").resize((300, 200))
        for source in {MODELS}:
            print(ModelProcessor(source).prepare(image).digest)
        print(sys.modules["torch"])
    """)
    image = Image.radial_gradient("L").convert("RGB").resize((300, 200))
    digests = [ModelProcessor(str(ROOT / source)).prepare(image).digest for source in MODELS]
    assert printed.splitlines() == [*digests, "None"]


def test_tokenizers_and_templates_are_loaded() -> None:
    printed = without_torch(f"""
        import sys
        from serve_app.catalog.served_model import load_model
        from serve_app.config.catalog_entry import ModelConfig

        model = load_model(ModelConfig(id="tiny/Vision", app="tiny", source={MODELS[0]!r}))
        print(model.takes_images, model.tokenizer("What colour is the shape?").input_ids)
        print(sys.modules["torch"])
    """)
    model = load_model(ModelConfig(id="tiny/Vision", app="tiny", source=str(ROOT / MODELS[0])))
    assert printed.splitlines() == [f"True {model.tokenizer('What colour is the shape?').input_ids}", "None"]


def test_a_process_that_has_torch_keeps_it() -> None:
    program = """
        import sys, torch
        from serve_app.base.without_torch import do_without_torch
        do_without_torch()
        print(sys.modules["torch"] is torch)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout == "True\n"
