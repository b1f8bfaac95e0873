"""A setting of every policy loss."""

from __future__ import annotations

SETTINGS = {
    "clip": {"low": 0.2, "high": 0.28, "dual": 3.0},
    "gspo": {"low": 0.2, "high": 0.28},
    "cispo": {"low": 0.2, "high": 0.28},
    "sapo": {"positive": 1.0, "negative": 1.05},
    "geo_mean": {"low": 0.4, "high": 0.3},
    "clip_cov": {"low": 0.2, "high": 0.28},
    "kl_cov": {"weight": 0.7},
    "dppo_tv": {"low": 0.05, "high": 0.05, "cap": 3.0},
    "dppo_kl": {"low": 0.02, "high": 0.01, "cap": 3.0},
    "dro": {"beta": 0.6},
    "importance": {"cap": 3.0, "of": "sequence"},
    "policy_gradient": {},
}
