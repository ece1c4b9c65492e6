"""The names by which a checkpoint may refer to its base model.

They are tried in this order: the id of a model, with or without a variant; its `also_known_as`; its `source`. A path
matches a `source` that ends in the same parts, so the folder's name is enough. A trailing slash is ignored.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from serve_app.config.catalog_entry import ModelConfig
from serve_app.config.checking.refusal import Refusal


class BaseNames:
    """The names of the models of one configuration."""

    def __init__(self, models: Sequence[ModelConfig]) -> None:
        self._models = models
        self._named: defaultdict[str, list[ModelConfig]] = defaultdict(list)
        for model in models:
            for name in _own_names(model):
                self._named[name].append(model)
        for model in models:
            for name in model.also_known_as:
                self._named[_plain(name)].append(model)

    def meant_by(self, name: str) -> list[ModelConfig]:
        """The models that the name may mean, the most likely first, with those of the same weights. Their weights
        differ only if the name is part of several paths.
        """
        whole = _plain(name)
        for asked in (whole, whole.partition(":")[0]):
            found = self._named.get(asked) or [model for model in self._models if _ends_alike(model, asked)]
            if found:
                weights = {model.weights for model in found}
                alike = [model for model in self._models if model.weights in weights]
                return list({model.id: model for model in (*found, *alike)}.values())
        return []


@dataclass(frozen=True, slots=True)
class Clash:
    """The model at `index` claims the name of an earlier one, or of one with another source."""

    index: int
    refusal: Refusal


def clashes(models: Mapping[int, ModelConfig]) -> Iterator[Clash]:
    """Names that models of different weights claim; `models` by their place in the configuration."""
    for index, model in models.items():
        for position, name in enumerate(map(_plain, model.also_known_as)):
            for other_index, other in models.items():
                if other.weights != model.weights and name in _claims(other, aliases=other_index < index):
                    path = f"models[{index}].also_known_as[{position}]"
                    sentence = f"{path} must not be a name of another model: {name!r} is one of {other.id!r}."
                    yield Clash(index, Refusal(path, sentence))


def _claims(model: ModelConfig, *, aliases: bool) -> tuple[str, ...]:
    also = map(_plain, model.also_known_as) if aliases else ()
    return (*_own_names(model), _plain(model.source), *also)


def _own_names(model: ModelConfig) -> tuple[str, ...]:
    return (model.id, *(f"{model.id}:{variant}" for variant in model.variants))


def _plain(name: str) -> str:
    return name.rstrip("/") or name


def _ends_alike(model: ModelConfig, name: str) -> bool:
    """Whether the name is the model's source, or the last parts of its path."""
    source = model.weights[0]
    if not source.startswith("/"):
        return name == _plain(source)
    asked = PurePosixPath(name).parts
    return bool(asked) and PurePosixPath(source).parts[-len(asked) :] == asked
