"""What the outcomes of many cases amount to, and the page that shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from faults.base import Fault
from faults.harness import TOP, Outcome
from faults.models import PLACES

MIN_MODULE, MIN_CAUSE = 0.95, 0.90
"""Shares of the visible cases in which the right module must come first and the right cause among the first three."""


SHORT = {"float32": "fp32", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Totals:
    """Counts over cases. ``visible``: numbers can show the fault; ``gated``: they cannot, but a gate must."""

    visible: int
    seen: int
    module_first: int
    cause_listed: int
    sided: int
    side_right: int
    gated: int
    caught: int
    silent: int
    benign: int
    cleared: int

    @property
    def good(self) -> bool:
        """Tell whether the suite is passed."""
        module, cause = self.module_first / max(self.visible, 1), self.cause_listed / max(self.visible, 1)
        caught = self.caught == self.gated and self.seen == self.visible
        caught = caught and self.cleared == self.benign
        return caught and module >= MIN_MODULE and cause >= MIN_CAUSE and self.side_right == self.sided

    def __str__(self) -> str:
        def share(part: int, whole: int) -> str:
            return f"{part} of {whole} ({part / max(whole, 1):.1%})"

        return (
            f"visible and not `consistent`: {share(self.seen, self.visible)}; right module first: "
            f"{share(self.module_first, self.visible)}; right cause among the first {TOP}: "
            f"{share(self.cause_listed, self.visible)}; right side, where one is named: "
            f"{share(self.side_right, self.sided)}; invisible, caught by a gate: {share(self.caught, self.gated)}; "
            f"invisible to numbers and gates: {self.silent}; no fault, and not called one: "
            f"{share(self.cleared, self.benign)}"
        )


def totals(outcomes: Sequence[Outcome]) -> Totals:
    """Count what the outcomes amount to."""
    found = [outcome for outcome in outcomes if not outcome.case.fault.benign]
    benign = [outcome for outcome in outcomes if outcome.case.fault.benign]
    visible = [outcome for outcome in found if outcome.case.visible]
    named = [o for o in visible if o.suspects and o.suspects[0]["side"] in ("a", "b")]
    gated = [outcome for outcome in found if not outcome.case.visible and outcome.case.fault.gate]
    return Totals(
        len(visible),
        sum(outcome.seen for outcome in visible),
        sum(outcome.module_rank == 1 for outcome in visible),
        sum(0 < outcome.cause_rank <= TOP for outcome in visible),
        len(named),
        sum(outcome.side_right for outcome in named),
        len(gated),
        sum(outcome.gated for outcome in gated),
        len(found) - len(visible) - len(gated),
        len(benign),
        sum(not missed(outcome) for outcome in benign),
    )


def missed(outcome: Outcome) -> str:
    """Return what is wrong with an outcome, empty where nothing is."""
    if outcome.case.fault.benign:
        explained = not outcome.suspects or outcome.cause_rank == 1
        return "" if not outcome.seen or (explained and outcome.verdict == "suspect") else "called a fault"
    if not outcome.case.visible:
        gate = outcome.case.fault.gate
        return f"the {gate} gate says nothing" if gate and not outcome.gated else ""
    wrong = []
    if not outcome.seen:
        wrong.append("consistent")
    if outcome.module_rank != 1:
        wrong.append(f"module rank {outcome.module_rank}")
    if not 0 < outcome.cause_rank <= TOP:
        wrong.append(f"cause rank {outcome.cause_rank}")
    if outcome.suspects and not outcome.side_right:
        wrong.append(f"side {outcome.suspects[0]['side']}")
    return ", ".join(wrong)


PAGE = """\
# Faults: what is found of bugs that are known to be there

Written by `make faults`: {faults} faults are put into small real models, one at a time: in the first layer, one in the
middle and the last (faults without a layer have one place), in fp32 and bf16, on either side. Both sides are captured
with the product's own hooks and compared with the default options. Side a is a rollout with plain attention, side b an
actor with torch's fused attention, so that healthy modules differ by rounding too. A *cause* is a slug of
[diagnosis.md](diagnosis.md); which causes and modules count as right, and why a fault can be invisible, is said in
`tests/faults/table.py`. `PYTHONPATH=tests python -m faults --only TEXT` runs the cases that are called so; `--keep`
keeps their dumps.

{totals}

Columns: verdict in the early / middle / late layer; rank of the right module and of the right cause among the suspects
(0: not listed); the first suspect of the {shown} layer, with the side it names (`?`: none) and its first piece of
evidence. *effect*: what the fault alone changes where it is declared invisible, in noise floors
([verdicts.md](verdicts.md)).
"""


def page(outcomes: list[Outcome], controls: list[tuple[str, str, int]], groups: Mapping[str, tuple[Fault, ...]]) -> str:
    """Return the page: totals, the table of every group of faults, the healthy controls."""
    faults = {outcome.case.fault.name for outcome in outcomes}
    lines = [
        PAGE.format(
            faults=len(faults),
            totals="\n".join(f"* {part}" for part in str(totals(outcomes)).split("; ")),
            shown="middle",
        )
    ]
    for title, faults_of in groups.items():
        names = [fault.name for fault in faults_of]
        lines += [f"## {title}", "", "| fault | dtype | verdict | module | cause | first suspect | evidence |"]
        lines += ["|---" * 7 + "|"]
        mine = [outcome for outcome in outcomes if outcome.case.fault.name in names]
        mine.sort(key=lambda outcome: (names.index(outcome.case.fault.name), outcome.case.dtype != "float32"))
        for (name, dtype), found in groupby(mine, lambda outcome: (outcome.case.fault.name, outcome.case.dtype)):
            lines.append(_row(name, dtype, list(found)))
        lines.append("")
    lines += ["## Healthy pairs", "", "| pair | verdict | suspects |", "|---|---|---|"]
    lines += [f"| {name} | {verdict} | {count} |" for name, verdict, count in controls]
    return "\n".join(lines) + "\n"


def _row(name: str, dtype: str, found: list[Outcome]) -> str:
    found.sort(key=lambda outcome: [*PLACES, "all"].index(outcome.case.place))
    shown = found[len(found) // 2]
    verdicts = " / ".join(outcome.verdict for outcome in found)
    if len({outcome.verdict for outcome in found}) == 1:
        verdicts = found[0].verdict
    modules, causes = (
        " / ".join(str(getattr(outcome, rank)) for outcome in found) for rank in ("module_rank", "cause_rank")
    )
    first, evidence = "none", ""
    if shown.suspects:
        entry = shown.suspects[0]
        side = entry["side"] if entry["side"] in ("a", "b", "both") else "?"
        first = f"{entry['name']} ({side}): {entry['cause']}"
        evidence = _short(entry["evidence"][0] if entry["evidence"] else "")
    if shown.case.fault.benign:
        verdicts += " (no fault)"
    elif not shown.case.visible:
        effect = max(outcome.effect or 0.0 for outcome in found)
        gate = f"caught by the {shown.case.fault.gate} gate" if shown.case.fault.gate else "no gate can know"
        verdicts += f" (invisible: effect {effect:.2g} floors; {gate})"
    cells = (name, SHORT[dtype], verdicts, modules, causes, first, evidence)
    return "| " + " | ".join(cells) + " |"


def _short(text: str, limit: int = 140) -> str:
    text = text.replace("|", "/")
    return text if len(text) <= limit else text[: limit - 3].rsplit(" ", 1)[0] + " ..."
