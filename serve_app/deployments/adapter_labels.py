"""The labels of adapters in metrics, which are few: an exporter keeps a series for every label that it ever saw."""

from dataclasses import dataclass, field
from typing import Final

_SHOWN_ADAPTERS: Final = 20
_ADAPTER_NAMES_EVER: Final = 200
_COUNTED_ADAPTERS: Final = 10_000
_DIGEST_CHARACTERS: Final = 12
OTHER: Final = "other"


@dataclass(slots=True)
class AdapterLabels:
    """Chooses the label of each adapter: the most used adapters have their own, the rest share `other`.

    The exporter never forgets a label, so one process creates at most `ever` of them.
    """

    top: int = _SHOWN_ADAPTERS
    ever: int = _ADAPTER_NAMES_EVER
    _uses: dict[str, int] = field(default_factory=dict)
    _shown: set[str] = field(default_factory=set)
    _given: set[str] = field(default_factory=set)

    def use(self, digest: str) -> str:
        """Count one use of an adapter; returns its label."""
        if len(self._uses) >= _COUNTED_ADAPTERS:
            self._forget_the_rare()
        self._uses[digest] = self._uses.get(digest, 0) + 1
        if digest not in self._shown and (digest in self._given or len(self._given) < self.ever):
            self._promote(digest)
        return digest[:_DIGEST_CHARACTERS] if digest in self._shown else OTHER

    def _promote(self, digest: str) -> None:
        if len(self._shown) >= self.top:
            least = min(self._shown, key=lambda shown: self._uses.get(shown, 0))
            # Twice as much: otherwise two adapters of similar use would replace each other repeatedly.
            if self._uses[digest] < 2 * max(1, self._uses.get(least, 0)):
                return
            self._shown.discard(least)
        self._shown.add(digest)
        self._given.add(digest)

    def _forget_the_rare(self) -> None:
        """Halve all counts, so that old use counts less."""
        self._uses = {digest: uses // 2 for digest, uses in self._uses.items() if uses > 1}
