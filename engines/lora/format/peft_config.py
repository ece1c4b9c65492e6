"""`adapter_config.json` of a LoRA adapter: which modules it adapts and with what scale, read as PEFT reads it.

Options that would change the computation and are not implemented are refused by name. The tensors say which modules are
adapted. The configuration must agree with them, because PEFT silently ignores tensors that it does not name.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from engines.interface.errors import AdapterRefused
from engines.lora.format.digest import CONFIG_FILE, Buffer
from engines.lora.format.patterns import Budget, Pattern, PatternRefused
from engines.lora.format.tensor_file import printable

# A value that is set means another computation. `fan_in_fan_out` is for a layer type that no model here has.
_UNSUPPORTED: Final = (
    "use_dora", "lora_bias", "modules_to_save", "trainable_token_indices", "layer_replication", "fan_in_fan_out",
    "alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config", "kasa_config", "velora_config",
    "monteclora_config", "megatron_config",
)  # fmt: skip
# Starting values that leave the base weights as they are. The others (pissa, olora, corda, loftq, lora_ga) train an
# adapter against changed base weights, which are not in the checkpoint.
_INITS: Final = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
# Fields of PEFT, and of trainers that write into the same file, that do not matter for the computation.
_IRRELEVANT: Final = frozenset((
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "inference_mode", "lora_dropout",
    "lora_dtype", "lora_ga_config", "loftq_config", "lorap_emb_lr", "lorap_lr_ratio", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "task_type",
))  # fmt: skip
_READ: Final = frozenset((
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern", "target_parameters", "init_lora_weights", "bias", "ensure_weight_tying",
))  # fmt: skip
_ALL_LINEAR: Final = "all-linear"
_MAX_PATTERNS: Final = 1000
_MAX_SHAPES: Final = 100
_PLAIN: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")

Names = Pattern | frozenset[str]  # names match the whole path, or all of it after a dot


Hit = tuple[int, float]
"""A key's place in the order of its table, and its number."""


@dataclass(frozen=True, slots=True)
class PatternTable:
    """A mapping from patterns to numbers in which the first match counts, as in PEFT's `get_pattern_key`.

    Some trainers write one key per module. Keys without special characters but dots are looked up, not searched.
    `plain` holds them by their length and by the positions of their dots, which stand for any character.
    """

    plain: Mapping[int, Mapping[tuple[int, ...], Mapping[str, Hit]]]
    patterns: tuple[tuple[Pattern, Hit], ...]

    def find(self, path: str) -> float | None:
        hits = [hit for pattern, hit in self.patterns if pattern.match(path)]
        for end in _ends(path):
            for dots, keys in self.plain.get(len(end), {}).items():
                hit = keys.get(_with_dots(end, dots))
                if hit is not None:
                    hits.append(hit)
        return min(hits)[1] if hits else None


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The fields that matter. `target_modules` None: any. `layers`: those of `layers_to_transform`, None for all."""

    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: PatternTable
    alpha_pattern: PatternTable
    target_modules: Names | None
    exclude_modules: Names
    layers: frozenset[int] | None
    layers_pattern: tuple[str, ...]
    target_parameters: frozenset[str]
    ties_embeddings: bool

    def rank_and_scale(self, *paths: str) -> tuple[int, float]:
        """For a module by its path. Further paths are other names of it, tried when the first has no pattern."""
        rank = self._find("rank_pattern", self.rank_pattern, paths)
        alpha = self._find("alpha_pattern", self.alpha_pattern, paths)
        rank = self.rank if rank is None else int(rank)
        alpha = self.alpha if alpha is None else alpha
        return rank, alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def _find(self, field: str, table: PatternTable, paths: Iterable[str]) -> float | None:
        if not table.plain and not table.patterns:
            return None
        try:
            return next((found for path in paths if (found := table.find(path)) is not None), None)
        except PatternRefused as exc:
            raise refused(f"a key of {field} {exc}.") from exc

    def names(self, *paths: str) -> bool:
        """Whether PEFT would adapt the module with this path, or with one of these, if it has several names."""
        return any(self._targets(path) and not self._excludes(path) for path in dict.fromkeys(paths))

    def names_parameter(self, path: str) -> bool:
        return not self.target_parameters.isdisjoint(_ends(path))

    def _targets(self, path: str) -> bool:
        targets = self.target_modules
        if targets is None:
            return True
        if isinstance(targets, Pattern):
            return self._matches("target_modules", targets, path)
        return path in targets or (not targets.isdisjoint(_ends(path)) and self._in_layers(path))

    def _excludes(self, path: str) -> bool:
        if isinstance(self.exclude_modules, Pattern):
            return self._matches("exclude_modules", self.exclude_modules, path)
        return bool(self.exclude_modules) and not self.exclude_modules.isdisjoint(_ends(path))

    def _matches(self, field: str, pattern: Pattern, path: str) -> bool:
        try:
            return pattern.fullmatch(path)
        except PatternRefused as exc:
            raise refused(f"the expression of {field} {exc}.") from exc

    def _in_layers(self, path: str) -> bool:
        if self.layers is None:
            return True
        parts = path.split(".")
        numbers = [(i, int(part)) for i, part in enumerate(parts[:-1]) if part.isdecimal()]
        for pattern in self.layers_pattern:
            for i, number in numbers:
                if pattern in _ends(".".join(parts[:i])):
                    return number in self.layers
        if self.layers_pattern:
            return False
        return next((number in self.layers for i, number in numbers if i >= 2), False)


def parse_config(text: Buffer) -> PeftConfig:
    """Raises `AdapterRefused` that names the field."""
    raw = _object(text)
    if raw.get("peft_type") != "LORA":
        raise refused(f"peft_type must be 'LORA', not {raw.get('peft_type')!r:.60}.")
    _refuse_unsupported(raw)
    layers = _indices(raw.get("layers_to_transform"))
    if isinstance(raw.get("target_modules"), str) and layers is not None:
        raise refused("layers_to_transform cannot go with a target_modules that is one string.")
    budget = Budget()
    return PeftConfig(
        rank=_count("r", raw.get("r", 8)),  # 8 and 8 are PEFT's defaults
        alpha=_number("lora_alpha", raw.get("lora_alpha", 8)),
        use_rslora=_flag(raw, "use_rslora"),
        rank_pattern=_table(raw, "rank_pattern", budget, _count),
        alpha_pattern=_table(raw, "alpha_pattern", budget, _number),
        target_modules=_names(raw, "target_modules", budget),
        exclude_modules=_names(raw, "exclude_modules", budget) or frozenset(),
        layers=layers,
        layers_pattern=_layers_pattern(raw.get("layers_pattern")),
        target_parameters=_strings("target_parameters", raw.get("target_parameters")),
        ties_embeddings=_flag(raw, "ensure_weight_tying"),
    )


def refused(message: str) -> AdapterRefused:
    return AdapterRefused(f"{CONFIG_FILE}: {message}")


def _object(text: Buffer) -> Mapping[str, object]:
    try:
        raw = json.loads(bytes(text).decode("utf-8"))
    except (ValueError, RecursionError) as exc:
        raise refused("it is not JSON.") from exc
    if not isinstance(raw, dict):
        raise refused("it is not a JSON object.")
    return raw


def _refuse_unsupported(raw: Mapping[str, object]) -> None:
    for name in _UNSUPPORTED:
        if raw.get(name):
            raise refused(f"{name} is not supported, got {raw[name]!r:.100}.")
    if raw.get("bias", "none") != "none":
        raise refused(f"bias must be 'none', not {raw['bias']!r:.60}.")
    init = raw.get("init_lora_weights", True)
    if not isinstance(init, bool | str | None) or (init.lower() if isinstance(init, str) else init) not in _INITS:
        raise refused(
            f"init_lora_weights {init!r:.60} trains against changed base weights; save the adapter with "
            "path_initial_model_for_weight_conversion."
        )
    for name, value in raw.items():
        if name in _READ or name in _IRRELEVANT or name in _UNSUPPORTED:
            continue
        # A variant of LoRA that is newer than this code would come as a switch or as a section.
        if value is True or (isinstance(value, dict | list) and value):
            raise refused(f"{printable(name)} is not a known field, got {value!r:.100}.")


def _number(field: str, value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9:
        return value
    raise refused(f"{field} must be a number, not {value!r:.60}.")


def _count(field: str, value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1e9:
        return value
    raise refused(f"{field} must be a positive integer, not {value!r:.60}.")


def _flag(raw: Mapping[str, object], field: str) -> bool:
    value = raw.get(field)
    if not isinstance(value, bool | None):
        raise refused(f"{field} must be true or false, not {value!r:.60}.")
    return bool(value)


def _table(raw: Mapping[str, object], field: str, budget: Budget, read: Callable[[str, object], float]) -> PatternTable:
    value = raw.get(field) or {}
    if not isinstance(value, dict):
        raise refused(f"{field} must be an object, not {value!r:.60}.")
    plain, patterns = dict[int, dict[tuple[int, ...], dict[str, Hit]]](), list[tuple[Pattern, Hit]]()
    for order, (key, number) in enumerate(value.items()):
        hit = (order, read(f"{field}[{printable(key)}]", number))
        if _PLAIN.issuperset(key):
            shapes = plain.setdefault(len(key), {})
            shapes.setdefault(tuple(i for i, character in enumerate(key) if character == "."), {})[key] = hit
            if len(shapes) > _MAX_SHAPES:
                raise refused(
                    f"{field} has keys of {len(key)} characters with dots in more than {_MAX_SHAPES} different places."
                )
        else:
            # The text is that of PEFT's `get_pattern_key`.
            patterns.append((_pattern(field, rf"(.*\.)?({key})$", budget, shown=key), hit))
        if len(patterns) > _MAX_PATTERNS:
            raise refused(f"{field} has more than {_MAX_PATTERNS} keys that are expressions.")
    return PatternTable(plain, tuple(patterns))


def _pattern(field: str, text: str, budget: Budget, *, shown: str) -> Pattern:
    try:
        return Pattern(text, budget)
    except PatternRefused as exc:
        raise refused(f"the expression {printable(shown)} of {field} {exc}.") from exc


def _names(raw: Mapping[str, object], field: str, budget: Budget) -> Names | None:
    """None when there is nothing to check: no value, or `all-linear`."""
    value = raw.get(field)
    if not isinstance(value, str):
        return None if value is None else _strings(field, value)
    if value.lower() == _ALL_LINEAR:
        return None
    return _pattern(field, value, budget, shown=value)


def _strings(field: str, value: object) -> frozenset[str]:
    if not isinstance(value, list | None) or not all(isinstance(item, str) for item in value or ()):
        raise refused(f"{field} must be a list of strings, not {value!r:.60}.")
    return frozenset(value or ())


def _layers_pattern(value: object) -> tuple[str, ...]:
    values = sorted(_strings("layers_pattern", [value] if isinstance(value, str) and value else value or None))
    if not all(_PLAIN.issuperset(item) for item in values):
        raise refused(f"layers_pattern must be plain names, not {value!r:.60}.")
    return tuple(values)


def _indices(value: object) -> frozenset[int] | None:
    values = [value] if isinstance(value, int) else value
    if values is None or values == []:
        return None
    if not isinstance(values, list) or not all(type(item) is int for item in values):
        raise refused(f"layers_to_transform must be integers, not {value!r:.60}.")
    return frozenset(values)


def _ends(path: str) -> Iterator[str]:
    """The path itself and what follows each of its dots."""
    yield path
    start = path.find(".")
    while start >= 0:
        yield path[start + 1 :]
        start = path.find(".", start + 1)


def _with_dots(path: str, dots: tuple[int, ...]) -> str:
    """The path with dots at these places of it."""
    pieces, end = list[str](), 0
    for dot in dots:
        pieces.append(path[end:dot])
        end = dot + 1
    return ".".join((*pieces, path[end:]))
