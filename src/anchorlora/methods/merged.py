"""Blocks merged with the earlier ones after training: cheap baselines that protect nothing.

    snapshot    F + q N            q = 1/2: the mean of the weights before and after the task
    ties        TIES(F, N)         trim each to its share q of largest entries, elect a sign by entry, average those that have it
    dare        F + drop(N) / q    each entry of N is kept with probability q

    F = s B_h A_h  (d_out, d_in), what all earlier tasks have left      N = s B A, the finished block      q  share

`snapshot` is WiSE-FT (Wortsman et al., CVPR 2022, arXiv 2109.01903) from task to task, and exact: B is scaled and stacked. `ties`
(Yadav et al., NeurIPS 2023, arXiv 2306.01708) and `dare` (Yu et al., ICML 2024, arXiv 2311.03099) work on entries of the weight's
change, the former by PEFT's `ties`. Their result has full rank; what is stored is its nearest matrix of rank R, by a
singular value decomposition as in PEFT's `ties_svd`. R is the sum of the ranks so far, so all three store as much as `PerTask`.

What differs: the papers merge models trained one by one from the base model; here a block trains on top of what is merged, and all
earlier tasks are one change, which TIES trims again. The first block stays as it is, but where the base model is to be kept
(`train`, `start.old_cores`): that is the past then, with F = 0. Shares are the papers' own: TIES keeps 20 %, DARE drops 20 %.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from anchorlora.errors import InvalidValue
from anchorlora.methods.plans import PerTask

if TYPE_CHECKING:
    from anchorlora.adapters import AdapterStack
    from anchorlora.methods.adapter_plan import TaskEnd

BY = ("snapshot", "ties", "dare")


@dataclass(frozen=True)
class MergedPerTask(PerTask):
    """A new block per task, merged at its end with what earlier tasks have left: snapshot interpolation, TIES or DARE.

    For TIES and DARE the change of one layer at a time is formed as a matrix, on the CPU and in float64, and decomposed.

    Args:
        by: "snapshot", "ties" or "dare".
        share: Of the new block that is added ("snapshot"), of the entries that are kept ("ties"), or the probability that an entry
            is kept ("dare"); above 0 and below 1.

    Raises:
        InvalidValue: There is no such way to merge, or the share is not between 0 and 1.

    Example:
        >>> from anchorlora import AdapterStack, MergedPerTask
        >>> from anchorlora.methods import TaskEnd
        >>> stack, plan = AdapterStack(tiny().unload(), targets=("q_proj",), rank=4, alpha=8), MergedPerTask("snapshot", 0.5)
        >>> for task in range(2):
        ...     plan.begin_task(stack, torch.Generator().manual_seed(task), first=task == 0)
        ...     for p in stack.trainable():
        ...         p.data += 0.1  # training, in a real loop
        ...     plan.end_task(stack, TaskEnd())
        >>> f = stack.factors()["model.layers.0.self_attn.q_proj"]
        >>> f.rank, [round(float(f.B[0, i]), 3) for i in (0, 4)]  # the second block counts half
        (8, [0.1, 0.05])
    """

    by: Literal["snapshot", "ties", "dare"] = "snapshot"
    share: float = 0.5
    rewrites = True
    only_block = False

    def __post_init__(self) -> None:
        if self.by not in BY:
            raise InvalidValue(f"blocks are merged by {', '.join(map(repr, BY))}, not by {self.by!r:.40}")
        if not 0 < self.share < 1:
            raise InvalidValue(f"MergedPerTask(share=..) lies between 0 and 1, not at {self.share}; PerTask() adds whole blocks")

    def end_task(self, stack: AdapterStack, end: TaskEnd) -> None:
        """Merge the finished block into the history.

        Args:
            stack: The model's adapters.
            end: Its `draw` is what DARE draws from. With protected cores there is a past, even before the first block.

        Raises:
            InvalidValue: DARE has nothing to draw from.
        """
        from anchorlora.adapters import merged_factors

        if self.by == "dare" and end.draw is None:
            raise InvalidValue("MergedPerTask('dare', ..) drops entries at random; pass TaskEnd(draw=generator)")
        new, grown = stack.newest(), stack.stacked()
        stack.check_history()
        for layer, block in new.items():
            if grown[layer].rank > block.rank or end.protected:
                grown[layer] = merged_factors(grown[layer], block.rank, by=self.by, share=self.share, draw=end.draw)
        stack.restore(grown, as_history=True)
