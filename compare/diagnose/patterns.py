"""Rules for a tensor whose two sides part: what pattern of the difference speaks for which cause, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

from probe.compare.diagnose.causes import EXACT, LIKELY, PATTERN, PLACE, PLAIN, WEAK
from probe.compare.diagnose.fits import EXPLAINED
from probe.compare.diagnose.observe import Observed

EXPLAINS = 1 - EXPLAINED
"""Share of a difference that a relation must explain."""

FIRST_OPS = 2
"""Operations before the tensor from which on everything is coarse: the embedding, the first norm or projection."""

MOVED = 0.2
"""Share of the features that must equal another one: two heads exchanged in eight move a quarter."""

Test = Callable[[Observed], bool]


@dataclass(frozen=True)
class Rule:
    """A cause, the families of tensors in which it shows (empty: all), what must hold, how sure that makes it, and the
    sentence that says so (fields: see :func:`sentence`)."""

    cause: str
    families: str
    when: Test
    confidence: float
    says: str

    def fires(self, seen: Observed) -> bool:
        """Tell whether the rule applies to what was seen of a tensor."""
        return (not self.families or seen.family in self.families.split()) and self.when(seen)


def always(_: Observed) -> bool:
    """Hold of every tensor: the module's place alone speaks for the cause."""
    return True


def _near(value: float, *targets: float, within: float = 0.02) -> bool:
    return any(abs(value / target - 1) < within for target in targets)


def _one_nan(seen: Observed) -> bool:
    return seen.nonfinite[0] != seen.nonfinite[1]


def _one_inf(seen: Observed) -> bool:
    return seen.nonfinite[2] != seen.nonfinite[3] and not _one_nan(seen)


def _rows(*kinds: str) -> Test:
    return lambda seen: seen.row_kind in kinds and not seen.metrics.nonfinite_mismatch


def _few_columns(seen: Observed) -> bool:
    return seen.channels is not None


def _scaled(seen: Observed) -> bool:
    return seen.is_scaled and not _doubled(seen)


def _doubled(seen: Observed) -> bool:
    return seen.is_scaled and _near(seen.slope, 2.0, 0.5, 4.0, 0.25, 8.0, 0.125)


def _starts_agree(seen: Observed) -> bool:
    return seen.starts_agree is True


def _starts_part(seen: Observed) -> bool:
    return seen.starts_agree is False


def _unrelated(seen: Observed) -> bool:
    """Tell whether the two sides are as far apart as unrelated rows: relative L2 near sqrt(2)."""
    return 0.7 < seen.metrics.rel_l2 < 3.0


def _coarse_all_along(seen: Observed) -> bool:
    return seen.coarse and seen.coarse_share > 0.8 and seen.entry.match.place.ops <= FIRST_OPS and not seen.alone


def _coarse_here(seen: Observed) -> bool:
    return seen.coarse and not _coarse_all_along(seen)


def _weights_unseen(seen: Observed) -> bool:
    return seen.e.gate("weights").status == "skipped"


def _far_norm(seen: Observed) -> bool:
    return not 0.77 < seen.metrics.norm_ratio < 1.3


def _window(seen: Observed) -> bool:
    return seen.row_kind == "from-position"


def _dropped(seen: Observed) -> bool:
    return bool(seen.fits.dropped)


def _dropped_at_start(seen: Observed) -> bool:
    return bool(seen.start_fits.dropped)


def _coarse_values(seen: Observed) -> bool:
    return bool(seen.fits.coarse_side) and not _coarse_all_along(seen)


def _moved(seen: Observed) -> bool:
    return seen.fits.moved > MOVED and not seen.fits.halves


def _halves(seen: Observed) -> bool:
    return seen.fits.moved > MOVED and seen.fits.halves


def _shifted(seen: Observed) -> bool:
    return seen.fits.offset > EXPLAINS and not seen.is_scaled


def _by_rows(seen: Observed) -> bool:
    return seen.fits.row_factors > EXPLAINS and not seen.is_scaled


def _by_columns(seen: Observed) -> bool:
    return seen.fits.column_factors > EXPLAINS and not seen.is_scaled


def _is_qkv(seen: Observed) -> bool:
    return seen.label.split(":")[0].endswith(("q_proj", "k_proj", "v_proj"))


def _zero_rows(seen: Observed) -> bool:
    return seen.fits.zero_rows > 0


_SURE = "{label} holds {nan_a} NaN and {inf_a} infinities in a, {nan_b} and {inf_b} in b"
_ROWS = "{row_count} of {row_of} rows of {label} are beyond rounding ({row_kind}{row_where})"
_COLUMNS = (
    "{column_count} of {column_of} features of {label} carry {column_share:.0%} of the squared difference ({columns})"
)
_SLOPE = "{label} of a is {slope:.4g} times that of b; relative L2 {slope_rel_l2:.2g} is left of {rel_l2:.2g}"
_STARTS_AGREE = "rows at position 0 agree in {label}, later ones part (relative L2 {rel_l2:.2g})"
_STARTS_PART = "rows at position 0 part too in {label} (relative L2 {rel_l2:.2g})"
_COARSE = (
    "{label} parts by relative L2 {rel_l2:.2g}, the size of a bfloat16 rounding, where {dtype} explains {floor:.2g}"
)
_COARSE_ALL = _COARSE + "; {coarse_share:.0%} of the tensors from there on part by no more than bfloat16 explains"
_WHOLE = "all rows of {whole} sequences part in {label}, those of all others agree"
_PREFIX = "{prefix_side} took the first rows from its prefix cache; {beyond:.0%} of the rows behind part in {label}"
_DROPPED = "{dropped:.1%} of the values of {label} are zero in {dropped_side} alone, one factor explains the others"
_ZERO = "{zero_rows:.0%} of the rows of {label} that were read are zero in {zero_side} alone"
_MOVED = "{moved:.0%} of the features of {label} equal another feature of the other side"
_OFFSET = "one row added to all explains {offset:.1%} of the difference of {label}"
_BY_ROWS = "one factor per row explains {row_factors:.1%} of the difference of {label}"
_BY_COLUMNS = "one factor per feature explains {column_factors:.1%} of the difference of {label}"
_VALUES = "all values of {label} are bfloat16 numbers in {coarse_side}, those of the other side are not"
_SIZE = "{label} parts by relative L2 {rel_l2:.2g} where rounding explains {floor:.2g} (norms a / b {norm_ratio:.4g})"

RULES: tuple[Rule, ...] = (
    Rule("nan", "", _one_nan, EXACT, _SURE),
    Rule("inf", "", _one_inf, EXACT, _SURE),
    Rule("row-corruption", "", _rows("one-row"), PLAIN, _ROWS),
    Rule("row-corruption", "", _rows("few-rows"), PATTERN, _ROWS),
    Rule("decode-kernel", "", _rows("decode-only"), PLAIN, _ROWS),
    Rule("position-range", "", _rows("from-position"), LIKELY, _ROWS),
    Rule("stale-prefix-cache", "", _rows("cached-prefix"), PLAIN, _ROWS),
    Rule("batch-variance", "", _rows("one-sequence"), PLACE, _ROWS),
    Rule("kv-cache-dtype", "attention", _rows("decode-only"), PLACE, _ROWS),
    Rule("column-corruption", "", _few_columns, PLAIN, _COLUMNS),
    Rule("batch-variance", "", lambda seen: seen.whole_sequences > 0, PATTERN, _WHOLE),
    Rule("padding-leak", "attention", lambda seen: seen.padded_sequences > 0, PLAIN, _WHOLE + ", the longest too"),
    Rule("stale-prefix-cache", "attention", lambda seen: bool(seen.behind_prefix), PLAIN, _PREFIX),
    Rule("dropout-on", "", _dropped, PLAIN, _DROPPED),
    Rule("dropout-on", "attention", _dropped_at_start, PLAIN, _DROPPED),
    Rule("missing-all-reduce", "embedding", _zero_rows, PLAIN, _ZERO),
    Rule("permuted-qkv", "linear", lambda seen: _moved(seen) and _is_qkv(seen), PLAIN, _MOVED),
    Rule("permuted-weights", "", _moved, LIKELY, _MOVED),
    Rule("tp-shards-swapped", "", _halves, PLAIN, _MOVED + ", the two halves exchanged"),
    Rule("wrong-bias", "linear", _shifted, PLAIN, _OFFSET),
    Rule("norm-eps", "norm", _by_rows, LIKELY, _BY_ROWS),
    Rule("norm-weight-offset", "norm", _by_columns, PATTERN, _BY_COLUMNS),
    Rule("stale-weights", "norm", _by_columns, PATTERN, _BY_COLUMNS),
    Rule("head-precision", "head", _coarse_values, PLAIN, _VALUES),
    Rule("norm-precision", "norm", _coarse_values, PLAIN, _VALUES),
    Rule("softmax-precision", "attention", _coarse_values, LIKELY, _VALUES),
    Rule("partial-sums", "linear", _coarse_values, LIKELY, _VALUES),
    Rule("precision", "", _coarse_values, PATTERN, _VALUES),
    Rule("scale", "", _scaled, PLAIN, _SLOPE),
    Rule("scale", "", _doubled, PATTERN, _SLOPE),
    Rule("duplicated-all-reduce", "linear mlp experts embedding", _doubled, LIKELY, _SLOPE),
    Rule("missing-residual", "residual", _far_norm, PATTERN, _SIZE),
    Rule("missing-residual", "residual", always, PLACE, _SIZE),
    Rule("precision", "", _coarse_all_along, LIKELY, _COARSE_ALL),
    Rule("head-precision", "head", _coarse_here, LIKELY, _COARSE),
    Rule("head-precision", "head", _coarse_all_along, LIKELY, _COARSE),
    Rule("norm-precision", "norm", _coarse_here, LIKELY, _COARSE),
    Rule("softmax-precision", "attention", _coarse_here, PATTERN, _COARSE),
    Rule("partial-sums", "linear", _coarse_here, PATTERN, _COARSE),
    Rule("weight-precision", "linear embedding head", _coarse_here, PLACE, _COARSE),
    Rule("position-offset", "rope attention", _starts_part, PATTERN, _STARTS_PART),
    Rule("rope-base", "rope", _starts_agree, PATTERN, _STARTS_AGREE),
    Rule("rope-pairing", "rope", lambda seen: _starts_agree(seen) and _unrelated(seen), PATTERN, _STARTS_AGREE),
    Rule("rope-scaling", "rope", _starts_agree, PLACE, _STARTS_AGREE),
    Rule("causal-mask", "attention", _starts_part, PATTERN, _STARTS_PART),
    Rule("attention-scale", "attention", _starts_agree, PATTERN, _STARTS_AGREE),
    Rule("sliding-window", "attention", _window, LIKELY, _ROWS),
    Rule("rope-base", "attention", _starts_agree, PLACE, _STARTS_AGREE),
    Rule("softcap", "attention", _starts_agree, WEAK, _STARTS_AGREE),
    Rule("norm-eps", "norm", always, PLACE, _SIZE),
    Rule("norm-weight-offset", "norm", _far_norm, PATTERN, _SIZE),
    Rule("activation", "activation", always, PLACE, _SIZE),
    Rule("gate-up-swapped", "activation", _unrelated, PLACE, _SIZE),
    Rule("router-fault", "router", always, PATTERN, _SIZE),
    Rule("expert-swapped", "experts", always, PLACE, _SIZE),
    Rule("norm-topk", "experts mlp", _scaled, LIKELY, _SLOPE),
    Rule("router-scale", "experts", _scaled, LIKELY, _SLOPE),
    Rule("shared-expert-missing", "mlp", _far_norm, PLACE, _SIZE),
    Rule("vocab-offset", "embedding", _unrelated, LIKELY, _SIZE),
    Rule("token-mismatch", "embedding", _unrelated, PLACE, _SIZE),
    Rule("untied-head", "head", _weights_unseen, PLACE, _SIZE),
    Rule("stale-weights", "linear norm embedding head", _weights_unseen, PLACE, _SIZE + "; weights were not compared"),
    Rule("unknown", "", always, PLACE, _SIZE),
)


def sentence(rule: Rule, seen: Observed) -> str:
    """Fill a rule's sentence with the figures of what was seen."""
    metrics, rows, channels = seen.metrics, seen.rows, seen.channels
    nan_a, nan_b, inf_a, inf_b = seen.nonfinite
    fits = seen.start_fits if rule.when is _dropped_at_start else seen.fits
    position = rows.figures.get("position") if rows is not None else None
    return rule.says.format(
        label=seen.label,
        nan_a=nan_a,
        nan_b=nan_b,
        inf_a=inf_a,
        inf_b=inf_b,
        rel_l2=metrics.rel_l2,
        floor=seen.floor,
        norm_ratio=metrics.norm_ratio,
        slope=seen.slope,
        slope_rel_l2=metrics.slope_rel_l2,
        dtype=seen.dtype,
        coarse_share=seen.coarse_share,
        row_kind=seen.row_kind,
        row_count=rows.rows if rows is not None else 0,
        row_of=rows.of if rows is not None else 0,
        row_where="" if position is None else f" {position}",
        column_count=channels.count if channels is not None else 0,
        column_of=channels.of if channels is not None else 0,
        column_share=channels.share if channels is not None and channels.share == channels.share else 1.0,
        whole=seen.whole_sequences,
        beyond=seen.share_beyond,
        prefix_side=seen.behind_prefix,
        **asdict(fits),
        columns=", ".join(map(str, channels.columns[:4])) if channels is not None else "",
    )
