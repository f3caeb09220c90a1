#!/usr/bin/env python3
"""Trains the pair of this folder: a tiny Llama and an EAGLE-3 draft for it, on the text of Python's standard library.

usage: train.py OUTPUT [--target-steps N] [--draft-steps N] [--modules N] [--threads N] [--seed N]

Run it with the Python of a cpu environment (it needs torch, transformers, tokenizers, safetensors). The corpus is the
standard library of the Python that runs it, so another Python gives another tokenizer and other weights; the same Python,
steps, seed and number of threads give the same ones, as far as torch does. It writes OUTPUT/target and OUTPUT/draft-eagle3.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 1024
CONTEXT = 128
BATCH = 16
DRAFT_DEPTH = 3
"""How many tokens ahead the draft is trained to go, each from its own hidden states."""
DEPTH_WEIGHT = 0.8
AUXILIARY_LAYERS = (0, 1, 2)
"""The target's layers whose outputs the draft reads, as SGLang counts them."""

CONFIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def corpus(modules: int) -> tuple[list[str], str]:
    """Return the names and the text of the standard library's top-level modules, in order of name."""
    # _sysconfigdata holds the paths of the machine that Python was built on
    files = sorted(file for file in Path(os.__file__).parent.glob("*.py") if not file.name.startswith("_sysconfigdata"))[:modules]
    return [str(file) for file in files], "".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)


def make_tokenizer(files: list[str], output: Path) -> Tokenizer:
    """Train a byte-level BPE tokenizer on the corpus and save it as a model's tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<pad>", "<s>", "</s>"]
    )
    tokenizer.train(files, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=2048)
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    fast.save_pretrained(output)
    return tokenizer


def batches(ids: Tensor, steps: int) -> Iterator[Tensor]:
    """Yield ``steps`` batches of random stretches of the corpus."""
    for _ in range(steps):
        starts = torch.randint(len(ids) - CONTEXT, (BATCH,)).tolist()
        yield torch.stack([ids[start : start + CONTEXT] for start in starts])


class Optimizer:
    """AdamW with gradients clipped and the learning rate falling along a half cosine to zero."""

    def __init__(self, module: nn.Module, rate: float, steps: int) -> None:
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._adamw = torch.optim.AdamW(self._parameters, rate)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._adamw, lambda step: 0.5 * (1 + math.cos(math.pi * step / max(steps, 1))))

    def step(self, loss: Tensor) -> None:
        """Take one step down ``loss``."""
        self._adamw.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._adamw.step()
        self._schedule.step()


def train_target(ids: Tensor, steps: int) -> LlamaForCausalLM:
    """Train the target to predict the corpus."""
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    optimizer = Optimizer(model, 3e-3, steps)
    for number, batch in enumerate(batches(ids, steps), 1):
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.step(loss)
        report("target", number, steps, f"loss {loss.item():.3f}")
    return model.eval().requires_grad_(False)


class RMSNorm(nn.Module):
    """Llama's normalization."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._epsilon) * self.weight


def linear(inputs: int, outputs: int) -> nn.Linear:
    """Return a projection without bias, as Llama has them."""
    return nn.Linear(inputs, outputs, bias=False)


class Attention(nn.Module):
    """The draft's attention: it reads an embedding and a hidden state side by side."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self._heads, self._kv_heads, self._size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        width = config.hidden_size
        self.q_proj = linear(2 * width, self._heads * self._size)
        self.k_proj = linear(2 * width, self._kv_heads * self._size)
        self.v_proj = linear(2 * width, self._kv_heads * self._size)
        self.o_proj = linear(self._heads * self._size, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        query, key, value = (
            projected.view(rows, length, heads, self._size).transpose(1, 2)
            for projected, heads in (
                (self.q_proj(x), self._heads),
                (self.k_proj(x), self._kv_heads),
                (self.v_proj(x), self._kv_heads),
            )
        )
        key, value = (one.repeat_interleave(self._heads // self._kv_heads, 1) for one in (self._rotate(key), value))
        output = functional.scaled_dot_product_attention(self._rotate(query), key, value, is_causal=True)
        return self.o_proj(output.transpose(1, 2).reshape(rows, length, -1))

    def _rotate(self, x: Tensor) -> Tensor:
        half = self._size // 2
        frequency = 1.0 / (10000.0 ** (torch.arange(0, self._size, 2).float() / self._size))
        angle = torch.outer(torch.arange(x.shape[2]).float(), frequency).repeat(1, 2)
        return x * angle.cos() + torch.cat([-x[..., half:], x[..., :half]], -1) * angle.sin()


class Mlp(nn.Module):
    """Llama's gated feed-forward block."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = linear(config.hidden_size, config.intermediate_size)
        self.up_proj = linear(config.hidden_size, config.intermediate_size)
        self.down_proj = linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """The draft's only layer; its names are those that SGLang loads."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config), Mlp(config)
        self.hidden_norm, self.input_layernorm, self.post_attention_layernorm = (
            RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(3)
        )

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Draft(nn.Module):
    """An EAGLE-3 draft, as SGLang's ``LlamaForCausalLMEagle3`` computes it."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.fc = linear(len(AUXILIARY_LAYERS) * config.hidden_size, config.hidden_size)
        self.midlayer = Layer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = linear(config.hidden_size, config.vocab_size)

    def forward(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next hidden states and the logits of one drafted token at every position."""
        hidden = self.midlayer(embedded, hidden)
        return hidden, self.lm_head(self.norm(hidden))


def train_draft(target: LlamaForCausalLM, ids: Tensor, steps: int) -> Draft:
    """Train the draft to say what the target would say, up to ``DRAFT_DEPTH`` tokens ahead (EAGLE-3's training-time test)."""
    draft = Draft(target.config)
    draft.lm_head.weight.data.copy_(target.lm_head.weight)
    optimizer = Optimizer(draft, 2e-3, steps)
    for number, batch in enumerate(batches(ids, steps), 1):
        with torch.no_grad():
            answer = target(input_ids=batch, output_hidden_states=True)
            features = torch.cat([answer.hidden_states[layer + 1] for layer in AUXILIARY_LAYERS], -1)
            # At t: the embedding of token t + 1 and the target's features at t, for the target's token after t + 1.
            embedded, wanted = target.model.embed_tokens(batch)[:, 1:], answer.logits.argmax(-1)[:, 1:]
        hidden, loss, hits = draft.fc(features)[:, :-1], torch.zeros(()), []
        for depth in range(DRAFT_DEPTH):
            following, logits = draft(embedded, hidden)
            guess, truth = logits[:, depth:], wanted[:, depth:]
            loss = loss + DEPTH_WEIGHT**depth * functional.cross_entropy(guess.reshape(-1, VOCABULARY), truth.reshape(-1))
            hits.append((guess.argmax(-1) == truth).float().mean().item())
            hidden = torch.cat([hidden[:, :1], following[:, :-1]], 1)  # the next step sees the draft's own hidden states
        optimizer.step(loss)
        report("draft", number, steps, "right, by depth: " + " ".join(f"{hit:.2f}" for hit in hits))
    return draft


def save_draft(draft: Draft, target: Path, output: Path) -> None:
    """Write the draft as SGLang reads it; its vocabulary is the target's, so the tables between them are trivial."""
    output.mkdir(parents=True, exist_ok=True)
    weights = {name: value.contiguous() for name, value in draft.state_dict().items()}
    weights |= {"d2t": torch.zeros(VOCABULARY, dtype=torch.int64), "t2d": torch.ones(VOCABULARY, dtype=torch.bool)}
    save_file(weights, output / "model.safetensors", {"format": "pt"})
    config: dict[str, Any] = json.loads((target / "config.json").read_text())
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": VOCABULARY,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(AUXILIARY_LAYERS), "use_aux_hidden_state": True},
    }
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def report(what: str, number: int, steps: int, how: str) -> None:
    """Print about twenty lines for each model."""
    if number == steps or number % max(steps // 20, 1) == 0:
        print(f"{time.strftime('%H:%M:%S')}  {what}  step {number} of {steps}  {how}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, metavar="OUTPUT")
    parser.add_argument("--target-steps", type=int, default=2000)
    parser.add_argument("--draft-steps", type=int, default=2000)
    parser.add_argument("--modules", type=int, default=150, help="how many modules of the standard library to learn from")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    output: Path = arguments.output / "target"
    output.mkdir(parents=True, exist_ok=True)
    files, text = corpus(arguments.modules)
    tokenizer = make_tokenizer(files, output)
    ids = torch.tensor(tokenizer.encode(text).ids)
    print(f"corpus: {len(files)} modules of Python {sys.version.split()[0]}, {len(ids)} tokens", flush=True)
    target = train_target(ids, arguments.target_steps)
    target.save_pretrained(output)
    save_draft(train_draft(target, ids, arguments.draft_steps), output, arguments.output / "draft-eagle3")


if __name__ == "__main__":
    main()
