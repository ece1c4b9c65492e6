"""Short texts that every CPython carries: what its standard library says of itself."""

import importlib
import inspect
import re
from dataclasses import dataclass

# fmt: off
MODULES = (
    "argparse", "bisect", "calendar", "collections", "configparser", "contextlib", "csv", "dataclasses", "datetime",
    "decimal", "difflib", "email.message", "enum", "fractions", "functools", "heapq", "html", "http.client",
    "inspect", "io", "ipaddress", "itertools", "json", "logging", "math", "operator", "pathlib", "pprint", "random",
    "re", "shutil", "statistics", "string", "subprocess", "tempfile", "textwrap", "threading", "urllib.parse",
    "uuid", "zipfile",
)
# fmt: on


@dataclass(frozen=True)
class Docstring:
    """A text in two parts; the second begins with a blank."""

    context: str
    continuation: str


def docstrings(count: int, *, longest: int = 400) -> list[Docstring]:
    """`count` different ones of 8 words or more, each cut to `longest` characters. Every other is parted after its
    first third, the rest before their last word.
    """
    texts = sorted({text[:longest].rstrip() for name in MODULES for text in _texts(name)})
    found = [text for text in texts if len(re.findall(r"\S \S", text)) >= 8]
    chosen = found[:: max(1, len(found) // count)][:count]
    return [_parted(text, at_its_end=bool(number % 2)) for number, text in enumerate(chosen)]


def _texts(name: str) -> list[str]:
    module = importlib.import_module(name)
    public = [value for key, value in sorted(vars(module).items()) if not key.startswith("_")]
    own = [value for value in public if getattr(value, "__module__", None) == name and callable(value)]
    methods = [method for value in own if inspect.isclass(value) for method in vars(value).values() if callable(method)]
    return [inspect.cleandoc(thing.__doc__) for thing in [module, *own, *methods] if isinstance(thing.__doc__, str)]


def _parted(text: str, *, at_its_end: bool) -> Docstring:
    """Between two words that a single blank parts: lm-eval moves other space from the one part into the other."""
    places = [match.start() + 1 for match in re.finditer(r"\S(?= \S)", text)]
    place = places[-1] if at_its_end else next(place for place in places if place > len(text) // 3)
    return Docstring(text[:place], text[place:])
