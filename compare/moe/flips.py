"""Compare the routing of two dumps layer by layer, and keep flips that rounding explains apart from faults.

A token whose experts differ between two engines gets another output from its layer, by no fault of any module after the
router. Every later tensor of that token, and through attention of the tokens behind it, differs with it. So ids are
compared as sets, each flip is checked against the two engines' own logits, and tensors after a flip are judged on the
tokens that were routed alike up to there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from probe.compare.align import RowAligner, RowJoin, pack, split
from probe.compare.figures import Rows
from probe.compare.judge import ROUNDING, Judgement
from probe.compare.match import Match, Matching
from probe.compare.merge import CanonicalReader
from probe.compare.moe.biased import BiasBounds, expert_groups, scores_of
from probe.compare.moe.routing import margin, membership, overlap, spread, swap_distance
from probe.compare.names.base import Source
from probe.compare.names.canonical import Place, place_of
from probe.errors import CompareError
from probe.metrics import BLOCK_VALUES

DERIVED = "route"
"""The operation that derives ids from logits by the model's rule, where an engine records none."""
ALIKE, OWN = "alike", "own"
"""Tokens that no flip has reached, and tokens that were not flipped themselves but may attend to ones that were."""


@dataclass
class LayerRouting:
    """One layer's routing of the tokens that both sides routed, sorted by (pair, position).

    ``sets_a``, ``sets_b``: bool [tokens, experts]; ``ids``: whether each side's ids were ``used`` or ``derived``;
    ``same``, ``overlap``: whether and how far a token's sets agree; ``reached``: an earlier flip had reached the token,
    so that its logits differ for that reason; ``margin_a``, ``margin_b``: how far each side's k-th logit lies above the
    next; ``distance``: how far apart the logits of the swapped experts lie, the larger of the two sides'; ``allowed``:
    the distance that the two sides' own logits explain (all four NaN where logits are not known); ``weights_l1``: the
    mean over tokens routed alike of the summed differences of their experts' weights.
    """

    layer: int
    keys: np.ndarray
    join: RowJoin
    sets_a: np.ndarray
    sets_b: np.ndarray
    ids: tuple[str, str]
    top_k: int
    same: np.ndarray
    overlap: np.ndarray
    reached: np.ndarray
    margin_a: np.ndarray
    margin_b: np.ndarray
    distance: np.ndarray
    allowed: np.ndarray
    replayed: tuple[bool, bool] = (False, False)
    weights_l1: float | None = None
    logits_rel_l2: float | None = None

    @property
    def flipped(self) -> np.ndarray:
        """Return bool [tokens]: the sets differ."""
        return ~self.same

    @property
    def unexplained(self) -> np.ndarray:
        """Return bool [tokens]: flips that do not follow from the two sides' logits; unknown logits explain none.

        Where a side replayed recorded ids, its logits chose nothing: every flip is one.
        """
        return self.flipped & ~(self.distance <= self.allowed) | (self.flipped & any(self.replayed))


@dataclass
class Routing:
    """The routing of two sides, looked at layer by layer as the measurement goes through them in execution order."""

    readers: tuple[CanonicalReader, CanonicalReader]
    aligner: RowAligner
    matching: Matching
    dtype: str = "float32"
    layers: dict[int, LayerRouting] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._matches = {match.label: match for match in (*self.matching.routing, *self.matching.matched)}
        shapes = [reader.side.shape for reader in self.readers]
        self._experts = max((shape.experts for shape in shapes), default=0)
        self._flips: dict[int, np.ndarray] = {}
        self.faulty = False

    # -- one layer ----------------------------------------------------------------------------------------------------

    def look(self, layer: int) -> LayerRouting | None:
        """Return a layer's routing, None where one side has no ids of it."""
        match = self._matches.get(f"layers.{layer}.mlp.router:ids")
        if layer not in self.layers and match is not None:
            found = self._read(layer, match)
            self.layers[layer] = found
            self._flips[layer] = found.keys[found.flipped]
        return self.layers.get(layer)

    def _read(self, layer: int, match: Match) -> LayerRouting:
        sources = match.source_a, match.source_b
        join = self.aligner.rows(*(reader.rows(source) for reader, source in zip(self.readers, sources)))
        ids = [reader.read(source).astype(np.int64) for reader, source in zip(self.readers, sources)]
        ids = [values[rows] for values, rows in zip(ids, (join.index_a, join.index_b))]
        experts = max(self._experts, *(int(values.max(initial=-1)) + 1 for values in ids))
        a, b = (membership(values, experts) for values in ids)
        keys = pack(join.pair, join.position)
        place = place_of(f"layers.{layer}.mlp.router:output.0", layer + 1)
        reached = ~self._left(place, keys, join)[ALIKE] if place is not None else np.zeros(len(keys), bool)
        used = tuple("derived" if source.operation == DERIVED else "used" for source in sources)
        unknown = np.full(len(keys), np.nan)
        found = LayerRouting(
            layer=layer,
            keys=keys,
            join=join,
            sets_a=a,
            sets_b=b,
            ids=(used[0], used[1]),
            top_k=max((values.shape[1] for values in ids), default=0),
            same=(a == b).all(axis=1),
            overlap=overlap(a, b),
            reached=reached,
            margin_a=unknown,
            margin_b=unknown.copy(),
            distance=unknown.copy(),
            allowed=unknown.copy(),
            replayed=(self._replayed(0, match.source_a), self._replayed(1, match.source_b)),
        )
        self._add_logits(found)
        return found

    def _replayed(self, side: int, source: Source) -> bool:
        """Tell whether a side's router took these ids from a recording."""
        natives = self.readers[side].side.natives
        modules = self.readers[side].side.dump.modules
        found = (modules.get(natives[label][0]) for label in source.native)
        return any(module is not None and bool(module.info.get("routing_replayed")) for module in found)

    def _add_logits(self, found: LayerRouting) -> None:
        """Fill margins and distances from the router's logits, on each side that has them."""
        match = self._matches.get(f"layers.{found.layer}.mlp.router:output.0")
        if match is None:
            return
        join = self.aligner.rows(self.readers[0].rows(match.source_a), self.readers[1].rows(match.source_b))
        _, here, there = np.intersect1d(found.keys, pack(join.pair, join.position), return_indices=True)
        experts = found.sets_a.shape[1]

        def logits() -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
            for at in _blocks(len(here), experts):
                rows_a, rows_b = join.index_a[there[at]], join.index_b[there[at]]
                a = self.readers[0].read(match.source_a, rows_a).astype(np.float64)
                yield here[at], a, self.readers[1].read(match.source_b, rows_b).astype(np.float64)

        bounds, d2, b2 = self._bounds(found), 0.0, 0.0
        if bounds is not None and found.flipped.any():
            for rows, a, b in logits():
                if a.shape == b.shape == (len(rows), experts):
                    bounds.learn(scores_of(a), found.sets_a[rows])
                    bounds.learn(scores_of(b), found.sets_b[rows])
        for rows, a, b in logits():
            if a.shape[1:] != b.shape[1:] or a.shape[1] != experts:
                return
            self._note_logits(found, rows, a, b, bounds)
            d2, b2 = d2 + float(np.square(a - b).sum()), b2 + float(np.square(b).sum())
        found.logits_rel_l2 = float(np.sqrt(d2 / b2)) if b2 else None

    def _bounds(self, found: LayerRouting) -> BiasBounds | None:
        """Return empty bounds of the biases where the choice does not follow from the logits alone."""
        configs = [(reader.side.dump.manifest.get("model") or {}).get("config") or {} for reader in self.readers]
        groups = [expert_groups(config, found.sets_a.shape[1]) for config in configs]
        return next((BiasBounds(known) for known in groups if known is not None), None)

    def _note_logits(
        self, found: LayerRouting, rows: np.ndarray, a: np.ndarray, b: np.ndarray, bounds: BiasBounds | None
    ) -> None:
        sets_a, sets_b = found.sets_a[rows], found.sets_b[rows]
        found.margin_a[rows], found.margin_b[rows] = margin(a, found.top_k), margin(b, found.top_k)
        if bounds is not None:
            a, b = scores_of(a), scores_of(b)
            apart = bounds.distance(a, sets_a, sets_b), bounds.distance(b, sets_b, sets_a)
        else:
            apart = swap_distance(a, sets_a, sets_b), swap_distance(b, sets_a, sets_b)
        found.distance[rows] = np.maximum(*apart)
        # what moves two logits past each other; and ties, which each engine's softmax rounds its own way
        ties = 4 * ROUNDING[self.dtype] / ROUNDING["float32"] * np.finfo(np.float32).eps
        largest = np.maximum(np.abs(a).max(axis=1, initial=0), np.abs(b).max(axis=1, initial=0))
        found.allowed[rows] = 2 * np.abs(a - b).max(axis=1, initial=0) + ties * largest

    def weights(self, match: Match) -> tuple[Rows, Rows, int]:
        """Return how to read each side's weights, each in its expert's column, and how many columns there are.

        Both functions take row numbers and return [rows, experts].
        """
        ids = self._matches.get(match.label.replace(":weights", ":ids"))
        if ids is None:
            raise CompareError(f"{match.label} has no ids beside it, so that no weight has an expert")
        sources = (match.source_a, ids.source_a), (match.source_b, ids.source_b)
        largest = [int(reader.read(numbers).max(initial=-1)) for reader, (_, numbers) in zip(self.readers, sources)]
        experts = max(self._experts, *(number + 1 for number in largest))

        def reading(reader: CanonicalReader, values: Source, numbers: Source) -> Rows:
            def read(rows: np.ndarray) -> tuple[np.ndarray, str]:
                weights, used = reader.read(values, rows), reader.read(numbers, rows).astype(np.int64)
                if weights.shape != used.shape:
                    raise CompareError(f"{match.label} does not hold one weight for each id")
                return spread(weights, used, experts), ""

            return read

        a, b = (reading(reader, *pair) for reader, pair in zip(self.readers, sources))
        return a, b, experts

    def note_weights(self, layer: int, a: Rows, b: Rows, experts: int, join: RowJoin) -> None:
        """Take the L1 distance of the joined rows' weights on the tokens that the layer routed alike."""
        found = self.look(layer)
        if found is None:
            return
        alike = np.flatnonzero(np.isin(pack(join.pair, join.position), found.keys[found.same]))
        distance = 0.0
        for at in _blocks(len(alike), experts):
            x, y = a(join.index_a[alike[at]])[0], b(join.index_b[alike[at]])[0]
            distance += float(np.abs(x.astype(np.float64) - y).sum())
        found.weights_l1 = distance / len(alike) if len(alike) else None

    def weights_gain(self, layer: int) -> float:
        """Return how much a softmax enlarges the relative error of its logits: at least 1.

        With weights w = softmax(l), dw_e / w_e = dl_e - sum_f w_f dl_f: an absolute error of the logits becomes a
        relative one of the weights, so that the gain is the logits' RMS times sqrt(2).
        """
        match = self._matches.get(f"layers.{layer}.mlp.router:output.0")
        if match is None:
            return 1.0
        reader, total, count = self.readers[1], 0.0, 0
        for at in _blocks(reader.stored_rows(match.source_b), reader.features(match.source_b)):
            logits = reader.read(match.source_b, np.arange(at.start, at.stop)).astype(np.float64)
            total, count = total + float(np.square(logits).sum()), count + logits.size
        return max(1.0, float(np.sqrt(2 * total / count))) if count else 1.0

    def judge_ids(self, layer: int, logits: str) -> Judgement:
        """Judge the ids of a layer: a flip is a fault unless rounding explains it.

        The two sides' logits explain a flip of logits that lie no further apart than the logits differ; a larger
        distance means that a side did not follow its own logits (another rule, a replay, a bias). ``logits``: the
        verdict on the layer's logits; where they diverge, rounding does not explain what follows from them.
        """
        found = self.layers[layer]
        flips, faults = int(found.flipped.sum()), int(found.unexplained.sum())
        if not flips:
            return Judgement("identical", 0.0, 0.0)
        share = f"{flips} of {len(found.keys)} tokens use other experts"
        if faults:
            self.faulty = True
            return Judgement("divergent", 0.0, 0.0, reason=f"{share}, {_faults(found)}")
        if logits == "divergent":
            self.faulty = True
            reason = f"{share}: the router's logits differ by more than rounding"
            return Judgement("divergent", 0.0, 0.0, reason=reason)
        distance = float(found.distance[found.flipped].max())
        reason = f"{share}; the two sides' logits explain each (swapped logits at most {distance:.2g} apart)"
        return Judgement("consistent", 0.0, 0.0, reason=reason)

    # -- tokens that flips have not reached ----------------------------------------------------------------------------

    def left(self, place: Place, join: RowJoin) -> dict[str, np.ndarray]:
        """Return for the joined rows of a tensor at ``place`` which were routed alike: bool [rows] per kind.

        :data:`ALIKE`: neither the token nor one that it attends to was flipped before; :data:`OWN`: the token itself
        was not. Empty where no flip came before, and after a flip that is a fault: its effects are to be seen.
        """
        if self.faulty or not any(len(keys) for keys in self._flips.values()):
            return {}
        left = self._left(place, pack(join.pair, join.position), join)
        return {} if left[ALIKE].all() else left

    def _left(self, place: Place, keys: np.ndarray, join: RowJoin) -> dict[str, np.ndarray]:
        own_layers, seen_layers = _reach(place)
        own = ~np.isin(keys, self._flipped_before(own_layers))
        first = self._first_positions(self._flipped_before(seen_layers))
        return {ALIKE: own & (join.position < first[join.pair]), OWN: own}

    def _flipped_before(self, layers: int) -> np.ndarray:
        found = [keys for layer, keys in self._flips.items() if layer < layers]
        return np.unique(np.concatenate(found)) if found else np.zeros(0, np.int64)

    def _first_positions(self, keys: np.ndarray) -> np.ndarray:
        """Return each pair's first flipped position, as large as positions go where it has none."""
        first = np.full(len(self.aligner.join.pairs) + 1, np.iinfo(np.int64).max)
        pair, position = split(keys)
        np.minimum.at(first, pair, position)
        return first


def _blocks(rows: int, features: int) -> Iterator[slice]:
    """Yield slices of rows whose values fit a block."""
    step = max(1, BLOCK_VALUES // max(1, features))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


_ATTENDED, _ROUTED = "layers.0.self_attn.o_proj:input.0", "layers.0.mlp.router:ids"
_INSIDE = tuple(place.rank[1] for place in (place_of(_ATTENDED, 1), place_of(_ROUTED, 1)) if place is not None)
"""Ranks inside a layer from where on a token has attended to others, and from where on its own experts matter."""


def _reach(place: Place) -> tuple[int, int]:
    """Return for a tensor how many layers' flips have reached a token itself, and how many through attention.

    A flip in layer i changes its token from the experts of layer i on, and the tokens behind it from the attention of
    layer i + 1 on.
    """
    layer, inside = place.rank[0], place.rank[1] if len(place.rank) > 1 else 0
    attended, routed = _INSIDE
    own = layer + 1 if inside >= routed else layer
    return own, layer if inside >= attended else layer - 1


def _faults(found: LayerRouting) -> str:
    faults = found.unexplained
    if any(found.replayed):
        sides = " and ".join(side for side, replayed in zip("ab", found.replayed) if replayed)
        return f"although {sides} replayed recorded ids"
    if np.isnan(found.distance[faults]).any():
        return "and no router logits are on both sides to explain it"
    worst = int(np.argmax(np.where(faults, found.distance - found.allowed, -np.inf)))
    if np.isinf(found.distance[worst]):
        return f"{int(faults.sum())} of them another number of experts"
    return (
        f"{int(faults.sum())} of them not by rounding: logits {found.distance[worst]:.2g} apart are swapped where the "
        f"two sides' logits explain {found.allowed[worst]:.2g}"
    )
