"""Kimi Linear and Kimi K3 in NumPy float64, one token after another, from a checkpoint's tensors.

A transcription of the models' equations by the names and shapes of published files, for one
sequence; nothing is shared with kernjax.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Tensors = dict[str, np.ndarray]


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)


def situ(gate: np.ndarray, up: np.ndarray, beta: float, linear_beta: float) -> np.ndarray:
    bounded = linear_beta * np.tanh(up / linear_beta)
    return beta * np.tanh(gate / beta) * sigmoid(gate) * bounded


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


class Kimi:
    """`text` is the language model's config, `tensors` those below `model.`, float64."""

    def __init__(self, text: dict[str, Any], tensors: Tensors) -> None:
        self.c, self.t = text, {name: x.astype(np.float64) for name, x in tensors.items()}
        self.linear = text["linear_attn_config"]
        self.eps = text["rms_norm_eps"]

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """[T, vocab] of tokens [T]."""
        size = self.c.get("attn_res_block_size")
        x, blocks = self.t["embed_tokens.weight"][tokens], []
        for layer in range(self.c["num_hidden_layers"]):
            at = f"layers.{layer}."
            if size is None:
                x = x + self.mixer(at, layer, self.norm(at + "input_layernorm", x))
                x = x + self.mlp(at, layer, self.norm(at + "post_attention_layernorm", x))
                continue
            h = self.mixture(at + "self_attention_res", [*blocks, x])
            if layer % size == 0:
                blocks, x = [*blocks, x], np.zeros_like(x)
            x = x + self.mixer(at, layer, self.norm(at + "input_layernorm", h))
            h = self.mixture(at + "mlp_res", [*blocks, x])
            x = x + self.mlp(at, layer, self.norm(at + "post_attention_layernorm", h))
        if size is not None:
            x = self.mixture("output_attn_res", [*blocks, x])
        return self.norm("norm", x) @ self.t["lm_head.weight"].T

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        return rms_norm(x, self.t[name + ".weight"], self.eps)

    def project(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.t[name + ".weight"].T

    def mixture(self, name: str, streams: list[np.ndarray]) -> np.ndarray:
        if len(streams) == 1:
            return streams[0]
        scores = [self.project(name + "_proj", self.norm(name + "_norm", s)) for s in streams]
        shares = softmax(np.stack(scores), axis=0)
        return np.sum(shares * np.stack(streams), axis=0)

    def mixer(self, at: str, layer: int, x: np.ndarray) -> np.ndarray:
        full = layer + 1 in self.linear["full_attn_layers"]
        return (self.latent_attention if full else self.delta)(at + "self_attn.", x)

    def delta(self, at: str, x: np.ndarray) -> np.ndarray:
        heads, dim = self.linear["num_heads"], self.linear["head_dim"]

        def convolved(name: str) -> np.ndarray:
            y, taps = self.project(at + f"{name}_proj", x), self.t[at + f"{name}_conv1d.weight"]
            padded = np.concatenate([np.zeros((taps.shape[2] - 1, y.shape[1])), y])
            y = [np.sum(padded[t : t + taps.shape[2]].T * taps[:, 0], 1) for t in range(len(y))]
            return silu(np.stack(y)).reshape(-1, heads, dim)

        q, k, v = (convolved(name) for name in "qkv")
        q, k = (y / np.sqrt(np.sum(y * y, -1, keepdims=True) + 1e-6) for y in (q, k))
        beta = sigmoid(self.project(at + "b_proj", x))
        f = self.project(at + "f_b_proj", self.project(at + "f_a_proj", x))
        f = (f + self.t[at + "dt_bias"]).reshape(-1, heads, dim)
        rate = np.exp(self.t[at + "A_log"].reshape(-1)[:heads])[:, None]
        bound = self.linear.get("gate_lower_bound")
        g = -rate * np.log1p(np.exp(f)) if bound is None else bound * sigmoid(rate * f)
        state, out = np.zeros((heads, dim, dim)), []
        for t in range(len(x)):
            state = state * np.exp(g[t])[:, :, None]
            error = (v[t] - np.einsum("hkv,hk->hv", state, k[t])) * beta[t][:, None]
            state = state + k[t][:, :, None] * error[:, None, :]
            out.append(np.einsum("hkv,hk->hv", state, q[t] * dim**-0.5))
        if self.linear.get("use_full_rank_gate"):
            gate = self.project(at + "g_proj", x)
        else:
            gate = self.project(at + "g_b_proj", self.project(at + "g_a_proj", x))
        o = rms_norm(np.stack(out), self.t[at + "o_norm.weight"], self.eps)
        return self.project(at + "o_proj", (o * sigmoid(gate.reshape(o.shape))).reshape(len(x), -1))

    def latent_attention(self, at: str, x: np.ndarray) -> np.ndarray:
        c, time = self.c, len(x)
        heads, nope, width = c["num_attention_heads"], c["qk_nope_head_dim"], c["v_head_dim"]
        if c["q_lora_rank"] is None:
            q = self.project(at + "q_proj", x)
        else:
            low = self.project(at + "q_a_proj", x)
            low = rms_norm(low, self.t[at + "q_a_layernorm.weight"], 1e-6)
            q = self.project(at + "q_b_proj", low)
        q = q.reshape(time, heads, -1)
        both = self.project(at + "kv_a_proj_with_mqa", x)
        latent, shared = both[:, : c["kv_lora_rank"]], both[:, c["kv_lora_rank"] :]
        latent = rms_norm(latent, self.t[at + "kv_a_layernorm.weight"], 1e-6)
        kv = self.project(at + "kv_b_proj", latent).reshape(time, heads, nope + width)
        shared = np.broadcast_to(shared[:, None], (time, heads, shared.shape[1]))
        k, v = np.concatenate([kv[..., :nope], shared], axis=-1), kv[..., nope:]
        scores = np.einsum("thd,shd->hts", q, k) * q.shape[-1] ** -0.5
        scores = np.where(np.tri(time, dtype=bool), scores, -np.inf)
        o = np.einsum("hts,shv->thv", softmax(scores), v).reshape(time, -1)
        if c.get("mla_use_output_gate"):
            o = o * sigmoid(self.project(at + "g_proj", x))
        return self.project(at + "o_proj", o)

    def mlp(self, at: str, layer: int, x: np.ndarray) -> np.ndarray:
        if layer < self.c["first_k_dense_replace"]:
            return self.gated(at + "mlp.{}_proj", ("gate", "up", "down"), x)
        return self.experts(at + "block_sparse_moe.", x)

    def gated(self, name: str, parts: tuple[str, str, str], x: np.ndarray) -> np.ndarray:
        gate, up = (self.project(name.format(part), x) for part in parts[:2])
        if self.c["hidden_act"] == "situ":
            betas = self.c["activation_situ_beta"], self.c["activation_situ_linear_beta"]
            hidden = situ(gate, up, *betas)
        else:
            hidden = silu(gate) * up
        return self.project(name.format(parts[2]), hidden)

    def experts(self, at: str, x: np.ndarray) -> np.ndarray:
        c = self.c
        scores = sigmoid(self.project(at + "gate", x))
        biased = scores + self.t[at + "gate.e_score_correction_bias"]
        latent = c.get("routed_expert_hidden_size") is not None
        h = self.project(at + "routed_expert_down_proj", x) if latent else x
        y = np.zeros_like(h)
        for t in range(len(x)):
            chosen = np.argsort(-biased[t])[: c["num_experts_per_token"]]
            weights = scores[t, chosen] / scores[t, chosen].sum() * c["routed_scaling_factor"]
            for expert, weight in zip(chosen, weights, strict=True):
                name = f"{at}experts.{expert}.{{}}"
                y[t] += weight * self.gated(name, ("w1", "w3", "w2"), h[t])
        if latent:
            if c["latent_moe_use_norm"]:
                y = self.norm(at + "routed_expert_norm", y)
            y = self.project(at + "routed_expert_up_proj", y)
        return y + self.gated(at + "shared_experts.{}_proj", ("gate", "up", "down"), x)
