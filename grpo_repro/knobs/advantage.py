"""③ The advantage: how much better a response is than its group.

    advantage(b) -> Â_N1 or Â_NT        reads b.return_N (the reward, less a KL charged to it) and the group ids

Group statistics are two-pass, in the reward's own precision. A group whose rewards are all equal has Â = 0 exactly. A group with
one response has nothing to be compared with: Â = 0 (the config refuses G = 1 with a group baseline).
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from grpo_repro.types import Minibatch, NonNegative, variant


@variant(group_baseline=True)
def group_zscore(b: Minibatch, *, ddof: Literal[0, 1] = 1, eps: NonNegative = 1e-4) -> Tensor:
    r"""Centred on the group's mean and divided by its standard deviation.

    $$\hat A_i = \frac{r_i - \mathrm{mean}(r)}{\mathrm{std}(r) + \epsilon}$$

    Source: DeepSeekMath (2402.03300), Sec. 4.1.2. The paper states neither ddof nor ε: ours are TRL's (1 and 1e-4, ε added to the
    standard deviation, not inside the root).
    Fixes: the scale of the reward drops out. Costs: a prompt's weight depends on its difficulty (CLAIMS A3), more with larger G.
    """
    centred_N, size_N, index_N = _centred(b)
    std_N = (_group_sum(centred_N**2, index_N)[index_N] / (size_N - ddof).clamp(min=1)).sqrt()
    return torch.where(_mixed(b, index_N), centred_N / (std_N + eps), torch.zeros_like(centred_N)).unsqueeze(1)


@variant(group_baseline=True)
def group_center(b: Minibatch) -> Tensor:
    r"""Centred on the group's mean.

    $$\hat A_i = r_i - \mathrm{mean}(r)$$

    Source: Dr. GRPO (2503.20783). Equals (G−1)/G of `leave_one_out`.
    Fixes: difficulty bias. Costs: the reward's scale sets the step.
    """
    centred_N, _, index_N = _centred(b)
    return torch.where(_mixed(b, index_N), centred_N, torch.zeros_like(centred_N)).unsqueeze(1)


@variant(group_baseline=True)
def leave_one_out(b: Minibatch) -> Tensor:
    r"""Compared with the mean of the others.

    $$\hat A_i = r_i - \frac{1}{G-1}\sum_{j\ne i} r_j$$

    Source: RLOO (2402.14740); Kool et al. 2019.
    Fixes: the baseline does not contain the sample itself, so the estimate is unbiased. Costs: more variance at small G.
    """
    centred_N, size_N, index_N = _centred(b)
    return torch.where(_mixed(b, index_N), centred_N * size_N / (size_N - 1).clamp(min=1), torch.zeros_like(centred_N)).unsqueeze(
        1
    )


@variant(group_baseline=True)
def batch_std(b: Minibatch, *, ddof: Literal[0, 1] = 1, eps: NonNegative = 1e-4) -> Tensor:
    r"""Centred on the group, divided by the standard deviation of the whole batch.

    $$\hat A_i = \frac{r_i - \mathrm{mean}_{group}(r)}{\mathrm{std}_{batch}(r) + \epsilon}$$

    Source: Lite PPO (2508.08221). Fixes: a group's own std is noisy and up-weights the very easy and the very hard.
    Costs: one outlying prompt scales the whole batch.
    """
    centred_N, _, index_N = _centred(b)
    std = _std(b.return_N, ddof)
    return torch.where(_mixed(b, index_N), centred_N / (std + eps), torch.zeros_like(centred_N)).unsqueeze(1)


def batch_zscore(b: Minibatch, *, ddof: Literal[0, 1] = 1, eps: NonNegative = 1e-4) -> Tensor:
    r"""Centred and scaled by the whole batch; no group at all. A KL in the reward is charged to the tokens that follow it.

    $$\hat A_{i,t} = \frac{A_{i,t} - \mathrm{mean}_{batch}(A)}{\mathrm{std}_{batch}(A)+\epsilon},\qquad A_{i,t} = r_i - \sum_{j\ge t}\beta k_{1,j}$$

    The batch statistics are over tokens, as in the paper's code. Source: REINFORCE++ (2501.03262).
    Fixes: no prompt-wise scale, so no overfitting to it. Costs: the baseline ignores how hard the prompt is.
    """
    raw_NT = b.r_N.unsqueeze(1).expand(b.mask_NT.shape)
    if b.penalty_NT is not None:
        raw_NT = raw_NT - b.penalty_NT.flip(1).cumsum(1).flip(1)
    live = raw_NT[b.mask_NT]
    if live.numel() == 0 or bool((live == live[0]).all()):
        return torch.zeros_like(raw_NT)
    return ((raw_NT - live.mean()) / (_std(live, ddof) + eps)).masked_fill(~b.mask_NT, 0.0)


@variant(group_baseline=True)
def max_rl(b: Minibatch, *, eps: NonNegative = 1e-4) -> Tensor:
    r"""Centred on the group's mean and divided by it.

    $$\hat A_i = \frac{r_i - \mathrm{mean}(r)}{\mathrm{mean}(r)+\epsilon}$$

    For rewards that are not negative. Source: MaxRL (2602.02710). Fixes: weight ~1/p, towards maximum likelihood of success.
    Costs: a rare success takes the whole step.
    """
    centred_N, _, index_N = _centred(b)
    mean_N = b.return_N - centred_N
    return torch.where(_mixed(b, index_N), centred_N / (mean_N + eps), torch.zeros_like(centred_N)).unsqueeze(1)


@variant(group_baseline=True)
def pass_at_k(b: Minibatch, *, k: Annotated[int, Field(ge=1)] = 4) -> Tensor:
    r"""The advantage of a response in a random subset of k, where the subset is right if any of its responses is.

    $$\bar R = 1-\binom{N_-}{k}\Big/\binom Nk,\quad \sigma=\sqrt{\bar R(1-\bar R)},\quad
      \hat A_+ = \frac{1-\bar R}{\sigma},\quad \hat A_- = \frac{1-\bar R-\binom{N_--1}{k-1}/\binom{N-1}{k-1}}{\sigma}$$

    A response counts as right when its reward is the group's highest and above 0; rewards should be binary. Source: 2508.10751.
    Fixes: pays for covering, not for repeating one answer. Costs: vanishes once fewer than k are wrong.
    """
    _, index_N = torch.unique(b.group_N, return_inverse=True)
    right_N = b.return_N > 0
    total_N = _group_sum(torch.ones_like(b.return_N), index_N)[index_N]
    wrong_N = _group_sum((~right_N).to(b.return_N.dtype), index_N)[index_N]
    fail_N = _choose_ratio(wrong_N, total_N, k)  # no right response among k
    fail_given_wrong_N = _choose_ratio(wrong_N - 1, total_N - 1, k - 1)
    sigma_N = (fail_N * (1 - fail_N)).sqrt()
    raw_N = torch.where(right_N, fail_N, fail_N - fail_given_wrong_N)
    return torch.where(sigma_N > 0, raw_N / sigma_N.clamp(min=1e-30), torch.zeros_like(raw_N)).unsqueeze(1)


def _choose_ratio(a_N: Tensor, n_N: Tensor, k: int) -> Tensor:
    """C(a, k) / C(n, k) = Π_j (a − j)/(n − j), 0 where a < k, 1 where k = 0."""
    ratio_N = torch.ones_like(n_N)
    for j in range(k):
        ratio_N = ratio_N * (a_N - j).clamp(min=0) / (n_N - j).clamp(min=1)
    return ratio_N


def _std(x_M: Tensor, ddof: int) -> Tensor:
    """Two-pass standard deviation of all values."""
    return (((x_M - x_M.mean()) ** 2).sum() / max(x_M.numel() - ddof, 1)).sqrt()


def _centred(b: Minibatch) -> tuple[Tensor, Tensor, Tensor]:
    """Reward less its group's mean, the group's size, and the group's index, all a row."""
    _, index_N = torch.unique(b.group_N, return_inverse=True)
    r_N = b.return_N
    size_G = _group_sum(torch.ones_like(r_N), index_N)
    return r_N - (_group_sum(r_N, index_N) / size_G)[index_N], size_G[index_N], index_N


def _group_sum(x_N: Tensor, index_N: Tensor) -> Tensor:
    groups = int(index_N.max()) + 1 if index_N.numel() else 0
    return torch.zeros(groups, dtype=x_N.dtype, device=x_N.device).index_add_(0, index_N, x_N)


def _mixed(b: Minibatch, index_N: Tensor) -> Tensor:
    """False for rows of a group whose returns are all equal: round-off must not become an advantage (NeMo-RL#4158)."""
    r_N = b.return_N
    groups = int(index_N.max()) + 1 if index_N.numel() else 0
    high_G = torch.full((groups,), -torch.inf, dtype=r_N.dtype, device=r_N.device).scatter_reduce_(0, index_N, r_N, "amax")
    low_G = torch.full((groups,), torch.inf, dtype=r_N.dtype, device=r_N.device).scatter_reduce_(0, index_N, r_N, "amin")
    return (high_G > low_G)[index_N]
