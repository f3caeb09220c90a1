#!/usr/bin/env python3
"""Writes targets and their one-layer EAGLE-3 drafts without weights, to be served with ``load-format: dummy``.

    python3 tests/gpu/models.py OUT

OUT gets target/ and draft/ (Llama-8B-shaped; config.json and the tokenizer of models/tiny), the same
below mla/ (MLA and MoE, 10 layers, 64 heads, like Kimi-K2.5 in small) and below mla-tiny/ (MLA, eight
layers, for comparisons in float32), and files for SGLang's --speculative-adaptive-config:
adaptive-off.json (three steps up to 32 requests, none from 33 on) and depths.json (three steps up to
96 requests, one from 97 on).
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

TOKENIZER = Path(__file__).resolve().parents[2] / "models/tiny/target"
TARGET: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
DRAFT = TARGET | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": 32000,
    "target_hidden_size": 4096,
}
MLA: dict[str, Any] = TARGET | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 10,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_theta": 50000.0,
    "rope_scaling": None,
    "num_nextn_predict_layers": 0,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "pad_token_id": 2,
    "use_cache": True,
    "ep_size": 1,
    "aux_loss_alpha": 0.001,
}
MLA.pop("head_dim")
MLA_DRAFT = DRAFT | {
    "model_type": "llama",
    "hidden_size": 5120,
    "target_hidden_size": 5120,
    "num_attention_heads": 40,
}
TINY_VOCABULARY = 8000
MLA_TINY = MLA | {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "first_k_dense_replace": 8,
    "q_lora_rank": 256,
    "vocab_size": TINY_VOCABULARY,
}
MLA_TINY_DRAFT = MLA_DRAFT | {
    "hidden_size": 512,
    "target_hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": TINY_VOCABULARY,
    "draft_vocab_size": TINY_VOCABULARY,
}
MODELS = {
    "target": TARGET,
    "draft": DRAFT,
    "mla/target": MLA,
    "mla/draft": MLA_DRAFT,
    "mla-tiny/target": MLA_TINY,
    "mla-tiny/draft": MLA_TINY_DRAFT,
}
ADAPTIVE_OFF = {"1": {"candidate_steps": [3]}, "33": {"candidate_steps": [0]}}
DEPTHS = {"1": {"candidate_steps": [3]}, "97": {"candidate_steps": [1]}}


def main() -> None:
    """Write everything below the directory that the command line names."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    out = Path(sys.argv[1])
    for name, config in MODELS.items():
        model = out / name
        model.mkdir(parents=True, exist_ok=True)
        for file in TOKENIZER.glob("*token*"):
            shutil.copy(file, model)
        (model / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    for file, slots in (("adaptive-off.json", ADAPTIVE_OFF), ("depths.json", DEPTHS)):
        (out / file).write_text(json.dumps(slots) + "\n")


if __name__ == "__main__":
    main()
