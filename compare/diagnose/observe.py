"""What the free-running comparison shows of one tensor: the figures that the rules of a diagnosis ask about."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from probe.compare.diagnose.fits import Fits, fits_of
from probe.compare.diagnose.leads import family_of
from probe.compare.evidence import ChannelPattern, Evidence, RowPattern
from probe.compare.judge import ROUNDING, effective_dtype
from probe.compare.measure import Measured
from probe.metrics import PairMetrics

NOISE = 4.0
"""Noise floors up to which a remainder counts as rounding: the suspect band of docs/verdicts.md."""


@dataclass(frozen=True)
class Observed:
    """One tensor whose two sides part, with the evidence around it."""

    e: Evidence
    entry: Measured
    metrics: PairMetrics

    @property
    def label(self) -> str:
        """Return the canonical label."""
        return self.entry.match.label

    @property
    def family(self) -> str:
        """Return norm, rope, attention, linear, ... (diagnose/leads.py)."""
        return family_of(self.label)

    @property
    def floor(self) -> float:
        """Return the noise floor (relative L2)."""
        return self.entry.judgement.floor

    @property
    def rows(self) -> RowPattern | None:
        """Return the pattern of the rows that part, where one was found."""
        return self.e.located.rows.get(self.label)

    @property
    def row_kind(self) -> str:
        """Return the kind of that pattern, empty without one."""
        return self.rows.kind if self.rows is not None else ""

    @property
    def channels(self) -> ChannelPattern | None:
        """Return the features that carry the error, where they are few."""
        return self.e.located.channels.get(self.label)

    # -- one factor -------------------------------------------------------------------------------------------------

    @property
    def slope(self) -> float:
        """Return s of the best fit a = s b over the whole tensor (NaN without one)."""
        return self.metrics.slope

    @property
    def is_scaled(self) -> bool:
        """Tell whether a = s b explains the difference: the remainder is rounding, or a tenth of it at most."""
        slope, rest, all_of_it = self.slope, self.metrics.slope_rel_l2, self.metrics.rel_l2
        if not np.isfinite(slope) or not np.isfinite(rest) or not all_of_it:
            return False
        return rest < max(0.1 * all_of_it, min(NOISE * self.floor, 0.3 * all_of_it))

    # -- rows and positions -----------------------------------------------------------------------------------------

    @cached_property
    def beyond(self) -> np.ndarray:
        """Return bool [rows]: joined rows whose error is more than rounding."""
        metrics, band = self.metrics, self.entry.judgement.row_band or np.inf
        # a quarter of the band: a row of a tensor that is wrong as a whole need not be beyond it by itself
        return np.asarray(
            (metrics.row_rel_l2 > min(band, max(self.floor, 0.25 * metrics.rel_l2))) | metrics.row_mismatch
        )

    @cached_property
    def starts_agree(self) -> bool | None:
        """Tell whether rows at position 0 agree while others part; None where no such row was compared."""
        join = self.entry.join
        if join is None:
            return None
        first = join.position == 0
        if not first.any() or first.all() or not self.beyond[~first].any():
            return None
        return not self.beyond[first].any()

    @cached_property
    def share_beyond(self) -> float:
        """Return the share of joined rows that part."""
        return float(self.beyond.mean()) if len(self.beyond) else 0.0

    @cached_property
    def whole_sequences(self) -> int:
        """Return how many sequences part in every row while all others agree; 0 where rows of one part and agree."""
        join = self.entry.join
        if join is None or not self.beyond.any() or self.beyond.all():
            return 0
        parting = np.unique(join.pair[self.beyond])
        inside = np.isin(join.pair, parting)
        return len(parting) if self.beyond[inside].mean() > 0.9 else 0

    @cached_property
    def padded_sequences(self) -> int:
        """Return how many sequences part as a whole where the longest does not: shorter ones are padded."""
        join = self.entry.join
        if not self.whole_sequences or join is None:
            return 0
        longest = int(join.pair[join.position.argmax()])
        return 0 if self.beyond[join.pair == longest].any() else self.whole_sequences

    @cached_property
    def behind_prefix(self) -> str:
        """Return the side that lacks the first rows of all sequences (a prefix cache) while those behind part.

        Empty where neither does.
        """
        join = self.entry.join
        if join is None or not len(join.position) or not join.position.min() or self.share_beyond < 0.5:
            return ""
        lone = (("a", self.e.rows.b), ("b", self.e.rows.a))
        return next((side for side, rows in lone if rows["prefix_cache"] or rows["not_stored"]), "")

    # -- values -----------------------------------------------------------------------------------------------------

    @cached_property
    def fits(self) -> Fits:
        """Return how the two sides relate; bfloat16 numbers are no mark where a side is declared that coarse."""
        found = fits_of(self.e, self.entry)
        return found if self.dtype in ("float32", "float64") else replace(found, coarse_side="")

    @cached_property
    def start_fits(self) -> Fits:
        """Return how they relate at position 0, where attention sees one token."""
        return fits_of(self.e, self.entry, starts_only=True)

    # -- precision --------------------------------------------------------------------------------------------------

    @cached_property
    def dtype(self) -> str:
        """Return the coarser dtype of the two sides of this tensor and of their models."""
        sides = self.e.side_a, self.e.side_b
        stored = (
            side.dtype_of(source) for side, source in zip(sides, (self.entry.match.source_a, self.entry.match.source_b))
        )
        models = (str(side.dump.manifest.get("dtype", "")) for side in sides)
        return effective_dtype(*stored, *models)

    def like_rounding_to(self, dtype: str) -> bool:
        """Tell whether the difference has the size of a few roundings to a dtype that is coarser than the tensor's."""
        if ROUNDING[dtype] < 8 * ROUNDING[self.dtype]:
            return False
        return 0.2 * ROUNDING[dtype] < self.metrics.rel_l2 < 6 * ROUNDING[dtype]

    @property
    def coarse(self) -> bool:
        """Tell whether the difference looks like a rounding to bf16 or fp16 of what is stored finer."""
        return any(self.like_rounding_to(dtype) for dtype in ("bfloat16", "float16"))

    @cached_property
    def coarse_share(self) -> float:
        """Return the share of the tensors from this one on that part as rounding to bf16 would make them."""
        after = [entry for entry in self.e.measured if entry.order >= self.entry.order and entry.metrics is not None]
        growth = ROUNDING["bfloat16"] / ROUNDING[self.dtype]
        fine = sum(0.02 * growth < entry.judgement.ratio < 3 * growth for entry in after)
        return fine / len(after) if after and growth > 8 else 0.0

    @property
    def alone(self) -> bool:
        """Tell whether this is the only broken one of the replayed modules: others compute as finely as they should."""
        return {found.label for found in self.e.replays.broken()} == {self.label}

    # -- the sides --------------------------------------------------------------------------------------------------

    @property
    def nonfinite(self) -> tuple[int, int, int, int]:
        """Return how many NaN (a, b) and infinities (a, b) the tensor holds."""
        return self.metrics.nan_x, self.metrics.nan_y, self.metrics.inf_x, self.metrics.inf_y


def observe(e: Evidence, label: str) -> Observed | None:
    """Return what is seen of a tensor, None where it was not compared."""
    entry = e.entry(label)
    if entry is None or entry.metrics is None:
        return None
    return Observed(e, entry, entry.metrics)
