"""③ The advantage: how much better a response is than its group.

    advantage(b) -> Â_N1 or Â_NT        reads b.return_N (the reward, less a KL charged to it) and the group ids

Group statistics are two-pass, in the reward's own precision. A group whose rewards are all equal has Â = 0 exactly. A group with
one response has nothing to be compared with: Â = 0 (the config refuses G = 1 with a group baseline).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from grpo_repro.types import Minibatch, NonNegative, Share, UnitInterval, variant


@variant(group_baseline=True, divides_by_group_std=True)
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


@variant(group_baseline=True, batch_statistics=True)
def batch_std(b: Minibatch, *, ddof: Literal[0, 1] = 1, eps: NonNegative = 1e-4) -> Tensor:
    r"""Centred on the group, divided by the standard deviation of the whole batch.

    $$\hat A_i = \frac{r_i - \mathrm{mean}_{group}(r)}{\mathrm{std}_{batch}(r) + \epsilon}$$

    The batch is the kept rows of the rollout, flat groups included. Source: Lite PPO (2508.08221).
    Fixes: a group's own std is noisy and up-weights the very easy and the very hard.
    Costs: one outlying prompt scales the whole batch.
    """
    centred_N, _, index_N = _centred(b)
    std = _std(b.return_N, ddof)
    return torch.where(_mixed(b, index_N), centred_N / (std + eps), torch.zeros_like(centred_N)).unsqueeze(1)


@variant(batch_statistics=True, token_advantage_with_kl=True)
def batch_zscore(b: Minibatch, *, ddof: Literal[0, 1] = 1, eps: NonNegative = 1e-4) -> Tensor:
    r"""Centred and scaled by the whole batch; no group at all. A KL in the reward is charged to the tokens that follow it.

    $$\hat A_{i,t} = \frac{A_{i,t} - \mathrm{mean}(A)}{\mathrm{std}(A)+\epsilon},\quad A_{i,t} = r_i - \sum_{j\ge t}\beta k_{1,j}$$

    The batch statistics are over the tokens in the loss, as in the paper's code; Â = 0 where all are equal.
    Source: REINFORCE++ (2501.03262).
    Fixes: no prompt-wise scale, so no overfitting to it. Costs: the baseline ignores how hard the prompt is.
    """
    raw_NT = b.r_N.unsqueeze(1).expand(b.mask_NT.shape)
    if b.penalty_NT is not None:
        raw_NT = raw_NT - b.penalty_NT.flip(1).cumsum(1).flip(1)
    return _whitened(raw_NT, b.mask_NT, ddof, eps)


@variant(group_baseline=True)
def max_rl(b: Minibatch, *, eps: NonNegative = 1e-4) -> Tensor:
    r"""Centred on the group's mean and divided by it.

    $$\hat A_i = \frac{r_i - \mathrm{mean}(r)}{\mathrm{mean}(r)+\epsilon}$$

    For rewards that are not negative: a group whose mean is below 0 would be taught the wrong way round. Source: MaxRL (2602.02710).
    Fixes: weight ~1/p, towards maximum likelihood of success.
    Costs: a rare success takes the whole step.
    """
    centred_N, _, index_N = _centred(b)
    mean_N = b.return_N - centred_N
    return torch.where(_mixed(b, index_N), centred_N / (mean_N + eps), torch.zeros_like(centred_N)).unsqueeze(1)


@variant(group_baseline=True, raw_reward=True)
def pass_at_k(b: Minibatch, *, k: Annotated[int, Field(ge=1)] = 4) -> Tensor:
    r"""The advantage of a response in a random subset of k, where the subset is right if any of its responses is.

    $$\bar R = 1-\binom{N_-}{k}\Big/\binom Nk,\quad \sigma=\sqrt{\bar R(1-\bar R)},\quad
      \hat A_+ = \frac{1-\bar R}{\sigma},\quad \hat A_- = \frac{1-\bar R-\binom{N_--1}{k-1}/\binom{N-1}{k-1}}{\sigma}$$

    A response counts as right when its reward is the group's highest and above 0; rewards should be binary, and a KL charged to the
    reward is not seen. Source: 2508.10751.
    Fixes: pays for covering, not for repeating one answer. Costs: vanishes once fewer than k are wrong.
    """
    _, index_N = torch.unique(b.group_N, return_inverse=True)
    _, high_G = _extremes(b.r_N, index_N)
    right_N = (b.r_N == high_G[index_N]) & (b.r_N > 0)
    total_N = _group_sum(torch.ones_like(b.r_N), index_N)[index_N]
    wrong_N = _group_sum((~right_N).to(b.r_N.dtype), index_N)[index_N]
    fail_N = _choose_ratio(wrong_N, total_N, k)  # no right response among k
    fail_given_wrong_N = _choose_ratio(wrong_N - 1, total_N - 1, k - 1)
    sigma_N = (fail_N * (1 - fail_N)).sqrt()
    raw_N = torch.where(right_N, fail_N, fail_N - fail_given_wrong_N)
    return torch.where(sigma_N > 0, raw_N / sigma_N.clamp(min=1e-30), torch.zeros_like(raw_N)).unsqueeze(1)


def _init_running(*, decay: float, eps: float) -> dict[str, float]:
    return {}


def _update_running(state: dict[str, float], metrics: Mapping[str, float], *, decay: float, eps: float) -> dict[str, float]:
    mean, square = metrics["reward"], metrics["reward/std"] ** 2 + metrics["reward"] ** 2
    if not state:
        return {"mean": mean, "square": square}
    return {"mean": decay * state["mean"] + (1 - decay) * mean, "square": decay * state["square"] + (1 - decay) * square}


@variant(init=_init_running, update=_update_running)
def running_zscore(
    b: Minibatch, *, decay: Share = 0.9, eps: NonNegative = 1e-4, state: Mapping[str, float] = MappingProxyType({})
) -> Tensor:
    r"""Centred and scaled by exponentially weighted statistics of the rewards of earlier rollouts.

    $$\hat A_i = \frac{r_i-\bar m}{\sqrt{\bar s-\bar m^2}+\epsilon},\quad \bar m\leftarrow\lambda\bar m+(1-\lambda)\,\mathrm{mean}(r)$$

    s̄ is the same average of r². The first rollout uses its own statistics. They are of the rewards as knob ⑦ gave them (the metrics
    `reward` and `reward/std`): with a transform or a KL in the reward the centre is off. Source: the seed document, knob ③.
    Fixes: unstable statistics of small groups. Costs: a baseline that lags and ignores the prompt.
    """
    r_N = b.return_N
    if state:
        mean, std = state["mean"], max(state["square"] - state["mean"] ** 2, 0.0) ** 0.5
    else:
        return _whitened(r_N, torch.ones_like(r_N, dtype=torch.bool), 0, eps).unsqueeze(1)
    return ((r_N - mean) / (std + eps) if std + eps > 0 else torch.zeros_like(r_N)).unsqueeze(1)


@variant(needs=("values",), token_advantage=True, batch_statistics=True)
def gae(b: Minibatch, *, gamma: UnitInterval = 1.0, lam: UnitInterval = 0.95, whiten: bool = True) -> tuple[Tensor, Tensor]:
    r"""Generalised advantage estimation with a critic; returns (Â_NT, target_NT), the target being what the critic is trained towards.

    $$\delta_t = r_t+\gamma V_{t+1}-V_t,\quad \hat A_t=\sum_{l\ge0}(\gamma\lambda)^l\delta_{t+l},\quad \mathrm{target}_t=\hat A_t+V_t$$

    The reward arrives at a response's last token in the loss, a KL in the reward at its own token; after the last token V = 0. `whiten`:
    Â is centred and scaled (ddof 1, ε 1e-8) over the batch's tokens, the target is not. Source: GAE (1506.02438); PPO (1707.06347).
    Fixes: credit for single tokens. Costs: a critic to train, and its bias.
    """
    mask_NT, value_NT = b.mask_NT, b.value_NT.masked_fill(~b.mask_NT, 0.0)
    last_NT = mask_NT & (mask_NT.flip(1).cumsum(1).flip(1) == 1)
    r_NT = torch.where(last_NT, b.r_N.unsqueeze(1), torch.zeros_like(value_NT))
    if b.penalty_NT is not None:
        r_NT = r_NT - b.penalty_NT
    advantage_NT = torch.zeros_like(value_NT)
    ahead_N, next_N = torch.zeros_like(b.r_N), torch.zeros_like(b.r_N)  # Â and V at the next token in the loss
    for t in range(mask_NT.shape[1] - 1, -1, -1):
        live_N = mask_NT[:, t]
        delta_N = r_NT[:, t] + gamma * next_N - value_NT[:, t]
        ahead_N = torch.where(live_N, delta_N + gamma * lam * ahead_N, ahead_N)
        next_N = torch.where(live_N, value_NT[:, t], next_N)
        advantage_NT[:, t] = torch.where(live_N, ahead_N, torch.zeros_like(ahead_N))
    target_NT = advantage_NT + value_NT
    return (_whitened(advantage_NT, mask_NT, 1, 1e-8) if whiten else advantage_NT), target_NT


@variant(needs=("steps",), token_advantage=True, raw_reward=True)
def process_reward(b: Minibatch, *, ddof: Literal[0, 1] = 1, eps: NonNegative = 1e-4) -> Tensor:
    r"""Step scores, normalised over all steps of the group; a token gets the sum of the steps that end at or after it.

    $$\tilde r_k=\frac{r_k-\mathrm{mean}(R)}{\mathrm{std}(R)+\epsilon},\qquad \hat A_{i,t}=\sum_{k:\ \mathrm{end}(k)\ge t}\tilde r_k$$

    R are the scores of all steps of all responses of the group; the reward of the whole response is not read. Â = 0 in a group whose
    scores are all equal, and after the last step.
    Source: DeepSeekMath (2402.03300), Sec. 4.1.3 (process supervision). Fixes: which step was wrong. Costs: needs a step verifier.
    """
    _, index_N = torch.unique(b.group_N, return_inverse=True)
    end_NT = b.step_end_NT & b.mask_NT
    score_NT = b.step_r_NT.masked_fill(~end_NT, 0.0)
    count_N = _group_sum(end_NT.sum(1).to(score_NT.dtype), index_N)[index_N]
    mean_N = _group_sum(score_NT.sum(1), index_N)[index_N] / count_N.clamp(min=1)
    centred_NT = (score_NT - mean_N.unsqueeze(1)).masked_fill(~end_NT, 0.0)
    std_N = (_group_sum((centred_NT**2).sum(1), index_N)[index_N] / (count_N - ddof).clamp(min=1)).sqrt()
    low_G, high_G = _extremes(score_NT[end_NT], index_N.unsqueeze(1).expand_as(end_NT)[end_NT], groups=_groups(index_N))
    mixed_N1 = (high_G > low_G)[index_N].unsqueeze(1)
    normalised_NT = torch.where(mixed_N1 & end_NT, centred_NT / (std_N.unsqueeze(1) + eps), torch.zeros_like(centred_NT))
    return normalised_NT.flip(1).cumsum(1).flip(1).masked_fill(~b.mask_NT, 0.0)


def _choose_ratio(a_N: Tensor, n_N: Tensor, k: int) -> Tensor:
    """C(a, k) / C(n, k) = Π_j (a − j)/(n − j), 0 where a < k, 1 where k = 0."""
    ratio_N = torch.ones_like(n_N)
    for j in range(k):
        ratio_N = ratio_N * (a_N - j).clamp(min=0) / (n_N - j).clamp(min=1)
    return ratio_N


def _std(x_M: Tensor, ddof: int) -> Tensor:
    """Two-pass standard deviation of all values."""
    return (((x_M - x_M.mean()) ** 2).sum() / max(x_M.numel() - ddof, 1)).sqrt()


def _whitened(x: Tensor, inside: Tensor, ddof: int, eps: float) -> Tensor:
    """Centred and scaled over the values inside, 0 outside, and 0 altogether where they are all equal: round-off is no signal."""
    live = x[inside]
    if live.numel() == 0 or bool((live == live[0]).all()):
        return torch.zeros_like(x)
    return ((x - live.mean()) / (_std(live, ddof) + eps)).masked_fill(~inside, 0.0)


def _centred(b: Minibatch) -> tuple[Tensor, Tensor, Tensor]:
    """Reward less its group's mean, the group's size, and the group's index, all a row."""
    _, index_N = torch.unique(b.group_N, return_inverse=True)
    r_N = b.return_N
    size_G = _group_sum(torch.ones_like(r_N), index_N)
    return r_N - (_group_sum(r_N, index_N) / size_G)[index_N], size_G[index_N], index_N


def _groups(index_N: Tensor) -> int:
    return int(index_N.max()) + 1 if index_N.numel() else 0


def _group_sum(x_N: Tensor, index_N: Tensor) -> Tensor:
    return torch.zeros(_groups(index_N), dtype=x_N.dtype, device=x_N.device).index_add_(0, index_N, x_N)


def _extremes(x_M: Tensor, index_M: Tensor, groups: int | None = None) -> tuple[Tensor, Tensor]:
    """The lowest and the highest value of each group; ∞ and −∞ where it has none."""
    empty_G = torch.full((_groups(index_M) if groups is None else groups,), torch.inf, dtype=x_M.dtype, device=x_M.device)
    return empty_G.scatter_reduce(0, index_M, x_M, "amin"), (-empty_G).scatter_reduce(0, index_M, x_M, "amax")


def _mixed(b: Minibatch, index_N: Tensor) -> Tensor:
    """False for rows of a group whose returns are all equal: round-off must not become an advantage (NeMo-RL#4158)."""
    low_G, high_G = _extremes(b.return_N, index_N)
    return (high_G > low_G)[index_N]
