"""A critic for advantages that need values: a linear head on the policy's hidden states, its loss and its learning rate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from grpo_repro.policy import Policy
from grpo_repro.types import Minibatch, Norm


@dataclass
class Critic:
    """V(x, y_<t) = head(h_t). The head starts at 0: the first advantages are the rewards themselves."""

    head: nn.Linear
    eps_clip: float | None
    coef: float
    detach: bool  # whether the trunk is spared the value loss

    @classmethod
    def of(cls, policy: Policy, eps_clip: float | None, coef: float, detach: bool) -> Critic:
        head = nn.Linear(policy.model.config.get_text_config().hidden_size, 1).to(policy.device)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        return cls(head, eps_clip, coef, detach)

    def __call__(self, hidden_MD: Tensor) -> Tensor:
        hidden_MD = hidden_MD.detach() if self.detach else hidden_MD
        return self.head(hidden_MD.to(self.head.weight.dtype)).squeeze(-1)

    def loss(self, value_NT: Tensor, b: Minibatch, norm: Norm) -> Tensor:
        """Half the squared error to the target, a mean over the minibatch's tokens, times `coef`; a partial sum like the policy's.

        With `eps_clip` a value may move at most that far from the rollout's before the error stops shrinking: the larger of the clipped and
        the unclipped error counts. Source: PPO's public implementation; GAE targets are those of the rollout.
        """
        value_NT, b = value_NT.masked_fill(~b.mask_NT, 0.0), b.masked()
        error_NT = (value_NT - b.target_NT) ** 2
        if self.eps_clip is not None:
            near_NT = b.value_NT + (value_NT - b.value_NT).clamp(-self.eps_clip, self.eps_clip)
            error_NT = torch.maximum(error_NT, (near_NT - b.target_NT) ** 2)
        return self.coef * 0.5 * error_NT.masked_fill(~b.mask_NT, 0.0).sum() / max(norm.tokens, 1)


def explained_variance(value_NT: Tensor, target_NT: Tensor, mask_NT: Tensor) -> dict[str, float]:
    """critic/explained_variance: 1 − Var(target − V)/Var(target) over the rollout's tokens; absent where the target is constant."""
    value, target = value_NT[mask_NT].double(), target_NT[mask_NT].double()
    if target.numel() < 2 or float(target.var()) == 0.0:
        return {}
    return {"critic/explained_variance": 1.0 - float((target - value).var() / target.var())}
