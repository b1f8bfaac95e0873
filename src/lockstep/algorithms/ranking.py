"""The loss of a reward model on ranked responses, as a sum in which each ranking has weight 1.

The suffixes of tensor names mean S scored responses (in order of their rankings, best first within a ranking), R
rankings, P pairs of a better and a worse response of one ranking, and n responses of the longest ranking.
"""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid, softplus

from lockstep.algorithms.reduce import sum_by
from lockstep.errors import Refusal
from lockstep.types import Sums

PAIR_LOSSES = ("sigmoid", "logexp")
RANKINGS = ("pairs", "plackett_luce")


def pair_loss(
    chosen_P: torch.Tensor, rejected_P: torch.Tensor, margin_P: torch.Tensor, kind: str = "sigmoid"
) -> torch.Tensor:
    """-log sigmoid(chosen - rejected - margin) (Bradley-Terry), or log(1 + exp(rejected - chosen + margin)).

    `sigmoid` and `logexp` are the same function; recipes may use either name.
    """
    if kind == "sigmoid":
        return -logsigmoid(chosen_P - rejected_P - margin_P)
    if kind == "logexp":
        return softplus(rejected_P - chosen_P + margin_P)
    raise Refusal.at("rm.loss", f"{kind!r} is not known", f"one of {', '.join(PAIR_LOSSES)}", code="unknown-name")


def ranking_loss(
    scores_S: torch.Tensor,
    ranking_S: torch.Tensor,
    margins_R: torch.Tensor,
    *,
    kind: str = "sigmoid",
    ranking: str = "pairs",
    centre: float = 0.0,
) -> Sums:
    """The loss of rankings of two or more responses; `ranking_S` (int64, non-decreasing) is a response's ranking index.

    - `pairs`: the mean of `pair_loss` over all pairs of a ranking (as in InstructGPT, arXiv 2203.02155).
    - `plackett_luce`: the negative log-likelihood of the ranking, divided by its n - 1 choices; `kind` is ignored. The
      margin is subtracted from the best score, so for a ranking of two responses `plackett_luce` is the sigmoid loss.

    `centre` adds the term centre x (2 x mean score)^2 per ranking; for two responses: centre x (chosen + rejected)^2
    (arXiv 2312.09244).

    Metrics are sums over rankings: `accuracy` (fraction of correctly ordered pairs, a tie is 0.5) and `margin` (better
    minus worse score) are means over the pairs of a ranking; `chosen` and `rejected` are the scores of the best and the
    worst response of a ranking.
    """
    count, margins_R = len(margins_R), margins_R.to(scores_S.dtype)
    sizes_R = sum_by(torch.ones_like(ranking_S), ranking_S, count)
    if count and int(sizes_R.min()) < 2:
        raise ValueError(f"ranking {int(sizes_R.argmin())} has fewer than two responses")
    better_P, worse_P = _pairs(ranking_S, sizes_R)
    of_P = ranking_S[better_P]
    share_P = 1 / (sizes_R * (sizes_R - 1) / 2).to(scores_S.dtype)[of_P]
    chosen_P, rejected_P = scores_S[better_P], scores_S[worse_P]
    if ranking == "pairs":
        loss = (share_P * pair_loss(chosen_P, rejected_P, margins_R[of_P], kind)).sum()
    elif ranking == "plackett_luce":
        loss = (_plackett_luce(scores_S, ranking_S, sizes_R, margins_R) / (sizes_R - 1)).sum()
    else:
        raise Refusal.at(
            "rm.ranking", f"{ranking!r} is not known", f"one of {', '.join(RANKINGS)}", code="unknown-name"
        )
    if centre:
        loss = loss + centre * (2 * sum_by(scores_S, ranking_S, count) / sizes_R).square().sum()
    gap_P = (chosen_P - rejected_P).detach()
    last_R = sizes_R.cumsum(0) - 1
    metrics = {
        "accuracy": (share_P * ((gap_P > 0).to(gap_P.dtype) + 0.5 * (gap_P == 0))).sum(),
        "margin": (share_P * gap_P).sum(),
        "chosen": scores_S.detach()[last_R - sizes_R + 1].sum(),
        "rejected": scores_S.detach()[last_R].sum(),
    }
    return Sums(loss=loss, metrics=metrics)


def _pairs(ranking_S: torch.Tensor, sizes_R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of the better and the worse response of each pair, sorted by the distance of their ranks."""
    longest = int(sizes_R.max()) if len(sizes_R) else 0
    better = [(ranking_S[:-distance] == ranking_S[distance:]).nonzero()[:, 0] for distance in range(1, longest)]
    worse = [positions + distance for distance, positions in enumerate(better, start=1)]
    none = ranking_S[:0]
    return torch.cat([none, *better]), torch.cat([none, *worse])


def _plackett_luce(
    scores_S: torch.Tensor, ranking_S: torch.Tensor, sizes_R: torch.Tensor, margins_R: torch.Tensor
) -> torch.Tensor:
    """Negative log-likelihood of each ranking by its scores s: -sum_i log(exp s_i / sum_{j >= i} exp s_j)."""
    count, longest = len(sizes_R), int(sizes_R.max()) if len(sizes_R) else 1
    first_R = sizes_R.cumsum(0) - sizes_R
    rank_S = torch.arange(len(scores_S), device=scores_S.device) - first_R[ranking_S]
    lowered_S = scores_S - torch.where(rank_S == 0, margins_R[ranking_S], 0.0)
    scores_Rn = scores_S.new_zeros(count, longest).index_put((ranking_S, rank_S), lowered_S)
    rank_n = torch.arange(longest, device=scores_S.device)
    real_Rn = rank_n < sizes_R[:, None]
    # The sum of a padded position contains only the position itself, so its term is 0 and no sum is empty.
    itself_nn = rank_n[:, None] == rank_n
    seen_Rnn = itself_nn | ((rank_n >= rank_n[:, None]) & real_Rn[:, None, :])
    left_Rn = torch.where(seen_Rnn, scores_Rn[:, None, :], float("-inf")).logsumexp(-1)
    return (left_Rn - scores_Rn).sum(-1)
