#!/usr/bin/env python3
"""Writes a Llama-8B-shaped target and a one-layer EAGLE-3 draft without weights, to be served with ``load-format: dummy``.

    python3 tests/gpu/models.py OUT

OUT gets target/ and draft/ (config.json and the tokenizer of models/tiny) and adaptive-off.json (three steps up to 32 requests, none from
33 on, for SGLang's --speculative-adaptive-config).
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
ADAPTIVE_OFF = {"1": {"candidate_steps": [3]}, "33": {"candidate_steps": [0]}}


def main() -> None:
    """Write everything below the directory that the command line names."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    out = Path(sys.argv[1])
    for name, config in (("target", TARGET), ("draft", DRAFT)):
        model = out / name
        model.mkdir(parents=True, exist_ok=True)
        for file in TOKENIZER.glob("*token*"):
            shutil.copy(file, model)
        (model / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (out / "adaptive-off.json").write_text(json.dumps(ADAPTIVE_OFF) + "\n")


if __name__ == "__main__":
    main()
