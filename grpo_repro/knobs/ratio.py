"""① The importance ratio: how far the new policy has moved from the old one, as a log-ratio.

    ratio(now, b) -> logw_NT        log w_{i,t}, bounded, with gradient

A log-ratio is bounded by ±20 before anything exponentiates it; beyond the bound its gradient is 0 (and the loop counts the hits).
"""

from __future__ import annotations

from torch import Tensor

from grpo_repro.types import Forward, Minibatch, variant

BOUND = 20.0


@variant(needs=("old",), token_level=True)
def token(now: Forward, b: Minibatch) -> Tensor:
    r"""One ratio a token.

    $$\log w_{i,t} = \log\pi_\theta(y_{i,t}\mid x, y_{i,<t}) - \log\pi_{old}(y_{i,t}\mid x, y_{i,<t})$$

    Source: DeepSeekMath (2402.03300), Eq. 3; PPO (1707.06347), Eq. 6.
    Fixes: nothing, it is the original. Costs: each is a one-sample weight, so it is noisy.
    """
    return _change(now, b).clamp(-BOUND, BOUND)


@variant(needs=("old",), sequence_level=True)
def sequence(now: Forward, b: Minibatch) -> Tensor:
    r"""One ratio a response: the geometric mean of its token ratios.

    $$\log s_i = \frac{1}{|y_i|}\sum_t \log w_{i,t}$$

    Source: GSPO (2507.18071), Eq. 7. The bound applies to the mean, not to the tokens (OpenRLHF#1293).
    Fixes: token noise (routing flips of a mixture of experts average out), reward and ratio have one unit.
    Costs: its scale is about σ/√|y|, so the clip's ε must shrink with it; every token of a response is clipped together.
    """
    logw_NT = _change(now, b) * b.mask_NT
    mean_N1 = logw_NT.sum(1, keepdim=True) / b.tokens_N1
    return mean_N1.clamp(-BOUND, BOUND).expand_as(logw_NT)


@variant(needs=("old",), token_level=True, sequence_level=True)
def sequence_token(now: Forward, b: Minibatch) -> Tensor:
    r"""The sequence ratio's value with each token's own gradient.

    $$s_{i,t} = sg[s_i]\cdot\frac{\pi_\theta(y_{i,t})}{sg[\pi_\theta(y_{i,t})]}$$

    Source: GSPO-token (2507.18071), Eq. 14. Equals `sequence` in value and gradient when Â is constant over a response.
    Fixes: lets a token-level advantage into GSPO. Costs: nothing more.
    """
    return _own(sequence(now, b).detach(), now)


@variant(unit=True)
def none(now: Forward, b: Minibatch) -> Tensor:
    r"""No ratio: w ≡ 1, with the score function's gradient.

    $$\log w_{i,t} = \log\pi_\theta(y_{i,t}) - sg[\log\pi_\theta(y_{i,t})]$$

    Source: REINFORCE (Williams 1992); RLOO (2402.14740).
    Fixes: there is no ratio to be noisy. Costs: right only on-policy (one update a rollout, no staleness).
    """
    return now.logp_NT - now.logp_NT.detach()


@variant(needs=("old",), token_level=True)
def prefix(now: Forward, b: Minibatch) -> Tensor:
    r"""The product of ratios up to and including the token: the exact weight of the state that was reached.

    $$\log w^{pre}_{i,t} = sg\Big[\sum_{u\le t}\log w_{i,u}\Big] + \log\pi_\theta(y_{i,t}) - sg[\log\pi_\theta(y_{i,t})]$$

    Source: MinPRO (2601.22718).
    Fixes: the bias of the token ratio off-policy. Costs: variance that grows with the position.
    """
    total_NT = (_change(now, b) * b.mask_NT).detach().cumsum(1)
    return _own(total_NT.clamp(-BOUND, BOUND), now)


def _change(now: Forward, b: Minibatch) -> Tensor:
    """log π_θ − log π_old of each token: the only place it is formed."""
    return now.logp_NT - b.old_NT


def _own(value_NT: Tensor, now: Forward) -> Tensor:
    """The value as it is (nothing is added that rounds), with each token's own gradient; none at the bound."""
    return value_NT + (now.logp_NT - now.logp_NT.detach()) * (value_NT.abs() < BOUND)
