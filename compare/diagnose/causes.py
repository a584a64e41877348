"""The causes that a diagnosis can name: their slugs, what each means, what to check next (docs/diagnosis.md)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """One cause. ``meaning``: a clause for a sentence; ``check``: the next step, where ``{module}``, ``{layer}``,
    ``{a}`` and ``{b}`` (the two dumps) are filled in."""

    meaning: str
    check: str


_SETTING = "compare {setting} of {module} with the checkpoint's config.json in both engines' start-up logs"
_CONVERT = "compare {module}'s parameters with the checkpoint: {show}"


def _setting(name: str) -> str:
    return _SETTING.replace("{setting}", name)


CAUSES: dict[str, Cause] = {
    # weights
    "stale-weights": Cause(
        "the parameters hold other values",
        "check that the weight sync ran for both engines before this step; " + _CONVERT,
    ),
    "lagged-weights": Cause(
        "the parameters are of another declared weight version", "dump both sides after the same weight sync"
    ),
    "permuted-qkv": Cause(
        "the fused QKV rows are in another order",
        "check the converter's QKV interleaving: groups of q heads, k, v per KV head against all q, all k, all v",
    ),
    "permuted-weights": Cause("rows or columns are in another order", "check the converter's order of {module}"),
    "transposed-weight": Cause("a weight is transposed", "check whether the converter transposes {module}"),
    "scaled-weight": Cause("a weight is multiplied by a factor", "look for a scale applied twice, or not, in {module}"),
    "gate-up-swapped": Cause("gate and up projections are exchanged", "check the order of gate | up in the converter"),
    "kv-swapped": Cause("keys and values are exchanged", "check the order of q | k | v in the converter"),
    "expert-swapped": Cause(
        "experts are exchanged", "compare local expert numbers with ep_rank x local experts + number in {module}"
    ),
    "missing-shard": Cause(
        "a tensor-parallel shard is missing or repeated", "check the shards of {module} rank by rank"
    ),
    "tp-shards-swapped": Cause("tensor-parallel shards are exchanged", "check the rank order of {module}'s shards"),
    "weight-precision": Cause(
        "a weight passed through a coarser dtype",
        "check the dtype in which the weight sync sends {module}, and quantisation",
    ),
    "untied-head": Cause(
        "lm_head is not the embedding that it should share, or the reverse",
        "check tie_word_embeddings, and that the weight sync updates both names",
    ),
    "wrong-bias": Cause("a bias is missing, stale or applied twice", "compare {module}.bias with the checkpoint"),
    "norm-weight-offset": Cause(
        "a norm multiplies by w + 1 instead of w, or the reverse", _setting("zero-centred gamma")
    ),
    # config and semantics
    "norm-eps": Cause("the norm's eps differs", _setting("rms_norm_eps")),
    "rope-base": Cause("the rope base differs", _setting("rope_theta")),
    "rope-scaling": Cause("rope scaling differs", _setting("rope_scaling (type, factor, original length)")),
    "rope-pairing": Cause(
        "rope pairs other features (halves against neighbours)", _setting("the rope style (NeoX, GPT-J)")
    ),
    "position-offset": Cause("positions are off", "compare the position ids that {module} receives in both engines"),
    "attention-scale": Cause("the attention scale differs", _setting("the softmax scale")),
    "causal-mask": Cause("the causal mask is off", "compare the masks: does token p see exactly positions 0 to p?"),
    "sliding-window": Cause("the attention window differs", _setting("sliding_window and layer_types")),
    "norm-topk": Cause("the chosen experts' weights are (not) renormalised", _setting("norm_topk_prob")),
    "router-bias": Cause(
        "the router's bias or correction differs", "compare the expert bias of {module} on both sides"
    ),
    "router-scale": Cause("the routed output is scaled otherwise", _setting("routed_scaling_factor")),
    "shared-expert-missing": Cause(
        "the shared expert's output is missing", "check that {module} adds the shared expert"
    ),
    "vocab-offset": Cause(
        "token ids look up other rows of the embedding", "compare the vocabulary range of each rank's shard of {module}"
    ),
    "activation": Cause("another activation function", _setting("hidden_act (silu, gelu, gelu_tanh)")),
    "softcap": Cause("soft-capping differs", _setting("attn_logit_softcapping and final_logit_softcapping")),
    "padding-leak": Cause(
        "padding takes part in attention", "run one sequence alone and compare: probe dump with one prompt"
    ),
    "other-config": Cause("a setting that changes the function differs", "make the two configs equal, then dump again"),
    # arithmetic
    "scale": Cause("the output is multiplied by a factor", "look for a scale applied twice, or not, in {module}"),
    "missing-residual": Cause(
        "the residual is not added",
        "check that {module} returns delta + residual (fused norms return the two apart)",
    ),
    "residual-not-summed": Cause(
        "the residual is added twice, or apart from what it should be summed with",
        "check what {module} adds: fused norms return delta and residual apart",
    ),
    "missing-all-reduce": Cause(
        "one rank's partial sum stands for the sum over ranks",
        "run with tensor parallelism 1; check {module}'s all-reduce",
    ),
    "duplicated-all-reduce": Cause(
        "the sum over ranks is taken twice", "run with tensor parallelism 1; check {module}'s all-reduce"
    ),
    "partial-sums": Cause(
        "partial sums are rounded to a coarse dtype",
        "force fp32 accumulation in {module}'s matmul (split-k, HF32, TF32 off)",
    ),
    "norm-precision": Cause("the norm computes in a coarse dtype", "upcast {module} to fp32, unfuse add + norm"),
    "softmax-precision": Cause(
        "softmax computes in a coarse dtype", "set attention_softmax_in_fp32, try another backend"
    ),
    "head-precision": Cause("lm_head computes in a coarse dtype", "run lm_head in fp32 on both sides"),
    "precision": Cause(
        "one side computes in a coarser dtype", "make dtypes equal (model, autocast, TF32, HF32), dump again"
    ),
    "dropout-on": Cause("dropout is active", "call model.eval(); set every dropout to 0"),
    "nan": Cause("NaN on one side only", "{show}: an overflow, a masked row, uninitialised memory?"),
    "inf": Cause("infinities on one side only", "{show}: is its dtype wide enough?"),
    "row-corruption": Cause("single rows are wrong", "rerun with that sequence alone, then with another batch size"),
    "column-corruption": Cause(
        "single features are wrong", "try another kernel for {module} (tile sizes, NZ format, TP edges)"
    ),
    "router-flip": Cause(
        "near ties of experts fall the other way by rounding", "replay the rollout's routing in the actor"
    ),
    "router-fault": Cause("experts are chosen by another rule", _setting("top-k, groups, scoring function and bias")),
    "kv-cache-dtype": Cause("keys and values are cached in a coarser dtype", "set kv_cache_dtype=auto, dump again"),
    "stale-prefix-cache": Cause(
        "cached prefixes are stale", "disable prefix caching, or reset it after each weight sync"
    ),
    "decode-kernel": Cause(
        "only decode steps differ", "rescore by prefill: probe dump --stage rollout --from {a}; compare with both"
    ),
    "position-range": Cause(
        "rows differ from one position on", "check block size, window, rope cache length and chunking at that position"
    ),
    "batch-variance": Cause(
        "results depend on the batch", "run the sequence alone and in its batch; use batch-invariant kernels"
    ),
    # tokens
    "token-mismatch": Cause(
        "token ids differ", "dump the second side from the first one's tokens (probe dump --from {a})"
    ),
    "temperature-semantics": Cause(
        "log-probs are taken before and after temperature",
        "set one logprobs_mode; divide logits by the temperature once",
    ),
    "renormalised-top-p": Cause(
        "log-probs are renormalised over the kept tokens", "score with top-p 1 and top-k off, or apply the same mask"
    ),
    "logprob-shift": Cause("log-probs are one token off", "log-prob of token p comes from row p - 1: check the slice"),
    "zero-filled-logprobs": Cause(
        "log-probs are filled with zeros or another constant", "check padding, cached prefixes, and prompt_logprobs"
    ),
    "raw-logprobs": Cause(
        "raw log-probs where processed ones are meant, or the reverse", "set logprobs_mode on the rollout"
    ),
    "logprob-source": Cause(
        "log-probs do not follow from logits that agree", "recompute log-probs from the dumped logits on both sides"
    ),
    "bypassed-logprobs": Cause(
        "both sides hold one array of log-probs",
        "let the actor recompute old_log_probs (verl: rollout_correction.bypass_mode=false), then compare again",
    ),
    "clipped-logprobs": Cause(
        "log-probs are clipped at a floor", "look for a clamp, or a log(p + eps), where log-probs are gathered"
    ),
    "not-logprobs": Cause(
        "values are above 0, which no log-prob is", "check the column that is read, its sign, and the response mask"
    ),
    "length-mismatch": Cause(
        "one side lacks the last token of sequences", "check whether both masks count the end-of-text token"
    ),
    # other
    "rounding": Cause("rounding accumulates", "measure the floor: probe dump --noise, then probe compare --floor"),
    "environment": Cause(
        "versions or switches differ that change numbers", "make the two environments equal, dump again"
    ),
    "unknown": Cause(
        "the evidence names no cause",
        "replay the module: probe compare {a} {b} --weights CHECKPOINT, or dump its inputs too",
    ),
}

FITS, EXACT, PLAIN, LIKELY, PATTERN, PLACE, WEAK = 0.95, 0.9, 0.8, 0.65, 0.5, 0.3, 0.15
"""The confidence scale (docs/diagnosis.md): a hypothesis that fits to within rounding; an exact check that failed; a
figure that only this cause gives; one that few causes give; a pattern alone; the module's place alone; hearsay."""
