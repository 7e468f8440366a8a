"""Our forward pass beside transformers' on the same checkpoint, side by side in one run.

  python benchmarks/beside_transformers.py [--only=prefill_f32,decode_f32,...]

A hybrid of 41 M parameters (hidden 512, 8 layers, vocabulary 8192) with random weights, 2 threads.
Each row alternates both sides, takes the best of each, and prints the ratio of their rates; beside
it the share of the GEMM rate and, for decode, of the memory bandwidth measured in the same run.
Needs the `transformers` extra. Machines are shared and noisy: read the ratios, not the rates.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kernjax.model import Decoder, ModelConfig, forward, init_cache, logits, plan_execution
from kernjax.model.params import random_params
from kernjax.precision import parse_policy
from kernjax.scoring.producer import Checkpoint
from kernjax.scoring.programs import Program
from kernjax.weights import save_hf

CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 8192,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "intermediate_size": 1792,
    "hidden_act": "silu",
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "attention_bias": False,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
    },
    "dtype": "float32",
    "eos_token_id": 0,
}
# name: (mode, dtype, batch, tokens, wanted ratio)
ROWS = {
    "prefill_f32": ("prefill", "f32", 1, 2048, 1.3),
    "prefill_bf16": ("prefill", "bf16", 1, 2048, 2.5),
    "decode_f32": ("decode", "f32", 1, 32, 3.0),
    "decode_f32_b4": ("decode", "f32", 4, 32, 3.0),
    "prefill_32k_f32": ("prefill", "f32", 1, 32768, 3.0),
}
WINDOW = 2048


class Ours:
    """kernjax: prefill in windows, decode by a compiled scan."""

    def __init__(self, directory: Path, dtype: str) -> None:
        self.config = ModelConfig.from_directory(directory)
        name = {"f32": "float32", "bf16": "bfloat16"}[dtype]
        decoder = Decoder(self.config, Checkpoint(directory).params(name))
        self.execution = plan_execution(parse_policy(dtype), self.config.num_layers)
        graph, self.params = nnx.split(decoder)

        def window(params, tokens, cache):
            model = nnx.merge(graph, params)
            hidden, cache, _ = forward(model, tokens, cache, self.execution)
            return logits(model, hidden[:, -1], self.execution), cache

        def decode(params, tokens, cache):
            model = nnx.merge(graph, params)

            def step(cache, token):
                hidden, cache, _ = forward(
                    model, token[:, None], cache, self.execution, decode=True
                )
                return cache, logits(model, hidden[:, 0], self.execution)

            cache, out = jax.lax.scan(step, cache, tokens.T)
            return out, cache

        self._window = Program(window, donate=(2,))
        self._decode = Program(decode)

    def prefill(self, tokens: np.ndarray):
        capacity = -(-tokens.shape[1] // WINDOW) * WINDOW + 512
        cache = init_cache(self.config, self.execution, tokens.shape[0], capacity)
        for start in range(0, tokens.shape[1], WINDOW):
            out, cache = self._window(
                self.params, jnp.asarray(tokens[:, start : start + WINDOW]), cache
            )
        return jax.block_until_ready(out), cache

    def decode(self, tokens: np.ndarray, cache):
        return jax.block_until_ready(self._decode(self.params, jnp.asarray(tokens), cache)[0])


class Theirs:
    """transformers' modelling code, torch on the CPU, sdpa attention."""

    def __init__(self, directory: Path, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(2)
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(
            directory, dtype={"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
        ).eval()

    def prefill(self, tokens: np.ndarray):
        with self.torch.no_grad():
            ids = self.torch.from_numpy(tokens.astype(np.int64))
            out = self.model(ids, use_cache=True, logits_to_keep=1)
        return out.logits, out.past_key_values

    def decode(self, tokens: np.ndarray, cache):
        with self.torch.no_grad():
            for column in tokens.T:
                ids = self.torch.from_numpy(column[:, None].astype(np.int64))
                out = self.model(ids, past_key_values=cache, use_cache=True)
        return out.logits


def seconds(call) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def gemm_rate(dtype) -> float:
    """FLOP/s of a 1024^3 product, best of five."""
    x = jnp.ones((1024, 1024), dtype)
    product = jax.jit(lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.float32))
    product(x, x).block_until_ready()
    return 2 * 1024**3 / min(seconds(lambda: product(x, x).block_until_ready()) for _ in range(5))


def bandwidth() -> float:
    """Bytes/s of reading 256 MiB of float32 with two threads (torch's sum), best of five."""
    import torch

    torch.set_num_threads(2)
    x = torch.ones(64 << 20)
    x.sum()
    return x.nbytes / min(seconds(x.sum) for _ in range(5))


def measure(name: str, directory: Path, repeats: int) -> None:
    mode, dtype, batch, count, wanted = ROWS[name]
    tokens = np.random.default_rng(0).integers(0, CONFIG["vocab_size"], (batch, count))
    tokens = tokens.astype(np.int32)
    prompt = np.resize(tokens, (batch, 128))
    best: dict[str, float] = {}
    sides = {"ours": Ours(directory, dtype), "transformers": Theirs(directory, dtype)}
    for number in range(repeats + 1):  # the first round compiles and warms up
        for side, model in sides.items():
            if mode == "prefill":
                spent = seconds(lambda model=model: model.prefill(tokens))
            else:
                _, cache = model.prefill(prompt)
                spent = seconds(lambda model=model, cache=cache: model.decode(tokens, cache))
            if number:
                best[side] = min(best.get(side, spent), spent)
    rate = {side: batch * count / spent for side, spent in best.items()}
    matrices = sum(leaf.size for leaf in jax.tree.leaves(sides["ours"].params) if leaf.ndim > 1)
    flops = 2 * (matrices - CONFIG["vocab_size"] * CONFIG["hidden_size"])
    gemm = gemm_rate(jnp.bfloat16 if dtype == "bf16" else jnp.float32)
    line = (
        f"{name:16} ours {rate['ours']:9,.0f} tok/s  transformers {rate['transformers']:8,.0f}"
        f"  ratio {rate['ours'] / rate['transformers']:5.2f} (wanted {wanted})"
        f"  GEMM share {rate['ours'] * flops / gemm:4.0%}"
    )
    if mode == "decode":
        line += f"  bandwidth share {rate['ours'] / batch * matrices * 4 / bandwidth():4.0%}"
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default=",".join(ROWS), help="rows, separated by commas")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "model"
        save_hf(random_params(ModelConfig.from_dict(CONFIG), 0), CONFIG, directory)
        for name in args.only.split(","):
            measure(name, directory, args.repeats)


if __name__ == "__main__":
    main()
