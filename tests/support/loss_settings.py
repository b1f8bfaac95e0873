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
    "policy_gradient": {},
}
