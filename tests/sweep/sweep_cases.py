"""Every class of the installed transformers that generates text, small, with its windows and scalings switched on."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)
from transformers.utils import logging

ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "longrope": {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 512},
}
# Those that people scale, and one of each way to build the rotation.
SCALED = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "phi3", "gemma3_text", "olmo2", "glm4", "granite")
# Phi-3 knows one scaling, and GLM's rotation of half a head no table of factors.
UNKNOWN = {*(("phi3", kind) for kind in ROPES if kind != "longrope"), ("glm4", "longrope")}
# Layers that a class can have and its default configuration has not.
LAYERS = {
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"], "num_hidden_layers": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
    "afmoe": {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2},
}
# Published values without which transformers cannot build or run a class, or builds none of its windows.
PUBLISHED: dict[str, dict[str, Any]] = {
    "dots1": {
        "n_routed_experts": 128,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2, "num_dense_layers": 1},
    "aya_vision": {
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152, "num_attention_heads": 16}
    },
    "dbrx": {
        "attn_config": {"clip_qkv": 8.0, "kv_n_heads": 8, "rope_theta": 500000.0},
        "ffn_config": {"moe_num_experts": 16, "moe_top_k": 4},
    },
    "granite4_vision": {"deepstack_layer_map": [[-2, 1]], "downsample_rate": "1/4"},
    "step3p7": {
        "text_config": {
            "sliding_window": 512,
            "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 11 + ["full_attention"],
            "rope_theta": ([5e6] + [1e4] * 3) * 11 + [5e6],
            "partial_rotary_factors": ([0.5] + [1.0] * 3) * 11 + [0.5],
            "attention_other_setting": {"num_attention_heads": 96},
        }
    },
    "deepseek_ocr2": {
        "text_config": {
            "num_hidden_layers": 12,
            "mlp_layer_types": ["dense", *["sparse"] * 11],
            "num_experts_per_tok": 6,
        }
    },
}
MORE = {
    "scaled logits": {
        "granite": {"logits_scaling": 8.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5},
        "granitemoe": {"logits_scaling": 8.0},
    },
    # The last layers read the keys and values of earlier ones; global layers have other heads, and values from keys.
    "shared kv": {
        "gemma4_text": {
            "num_kv_shared_layers": 4,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
        },
    },
}


# Sections of rotary frequencies for time, height and width. Published folders have them, the default configs do not.
SECTIONS = {
    **{key: [16, 24, 24] for key in ("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_thinker", "paddleocr_vl")},
    **{key: [8, 12, 12] for key in ("glm4v", "glm4v_moe", "glm46v", "glmga", "glm_ocr")},
    "ernie4_5_vl_moe": [22, 22, 20],
    "hunyuan_vl": [16, 16, 16, 16],
}


@dataclass(frozen=True)
class Case:
    """A model type, and what is switched on besides its defaults."""

    model_type: str
    variant: str = ""

    def __str__(self) -> str:
        return f"{self.model_type}+{self.variant.replace(' ', '_')}" if self.variant else self.model_type

    def config(self) -> Any:
        """The full-sized configuration; raises what transformers raises where it has none."""
        with _quiet():
            config = AutoConfig.for_model(self.model_type, **self._switches())
            if self.model_type in SECTIONS:
                text = config.get_text_config(decoder=True)
                text.rope_parameters = {**text.rope_parameters, "mrope_section": SECTIONS[self.model_type]}
            if self.variant in ROPES:
                _scale(config.get_text_config(decoder=True), self.variant)
            return config

    def _switches(self) -> dict[str, Any]:
        if self.variant == "window":
            return {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}
        if self.variant == "layers":
            return LAYERS[self.model_type]
        return {**PUBLISHED.get(self.model_type, {}), **MORE.get(self.variant, {}).get(self.model_type, {})}


def all_cases() -> list[Case]:
    types = list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    # Models with towers: images, video or audio beside text.
    towers = {**MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}
    cases = [Case(name) for name in {*types, *towers}]
    cases += [Case(name, "window") for name in types if _window_is_off(name)]
    cases += [Case(name, kind) for name in SCALED for kind in ROPES if (name, kind) not in UNKNOWN]
    cases += [Case(name, "layers") for name in LAYERS if name in types]
    cases += [Case(name, variant) for variant, names in MORE.items() for name in names]
    return sorted(cases, key=str)


def _window_is_off(name: str) -> bool:
    """Has a window, and does not look through it by default."""
    try:
        config = Case(name).config().get_text_config(decoder=True)
    except (StrictDataclassError, ValueError):
        return False
    if not hasattr(config, "sliding_window"):
        return False
    return config.sliding_window in (None, 0) or not getattr(config, "use_sliding_window", True)


def _scale(config: Any, kind: str) -> None:
    rope = dict(ROPES[kind])
    own = config.rope_parameters
    flat = own if "rope_type" in own else next(iter(own.values()))
    rope["rope_theta"] = flat["rope_theta"]
    if kind == "longrope":
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        pairs = int(head * flat.get("partial_rotary_factor", 1.0)) // 2
        rope["short_factor"] = [1.0 + place / pairs for place in range(pairs)]
        rope["long_factor"] = [2.0 + 8.0 * place / pairs for place in range(pairs)]
    config.rope_parameters = rope if "rope_type" in own else dict.fromkeys(own, rope)
    if hasattr(config, "original_max_position_embeddings"):
        config.original_max_position_embeddings = rope.get("original_max_position_embeddings") or 4096


@contextlib.contextmanager
def _quiet() -> Any:
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(before)
