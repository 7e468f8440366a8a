"""The vendor's side of a trace: transformers' modelling code on torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from .checkpoints import CLASSES
from .trace import Cached, Trace


def load(directory: Path, dtype: str, attn_implementation: str) -> Any:
    """The directory's model, text only; AssertionError where a tensor does not fit."""
    import torch
    import transformers

    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=getattr(torch, dtype),
        attn_implementation=attn_implementation,
        output_loading_info=True,
    )
    assert type(model).__name__ in CLASSES.values()
    assert not any(report[kind] for kind in ("missing_keys", "mismatched_keys")), report
    assert all("visual" in n or "mtp" in n for n in report["unexpected_keys"]), report
    return model.eval()


def run(model: Any, tokens: np.ndarray, context_len: int, window: int | None = None) -> Trace:
    """The trace of tokens int32 [B, C + D + 1], prefilled in windows (None: whole)."""
    import torch
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    ids = torch.from_numpy(tokens.astype(np.int64))
    seen: list[list[torch.Tensor]] = [[] for _ in model.model.layers]
    hooks = [
        layer.register_forward_hook(lambda _, __, out, at=at: seen[at].append(_first(out)))
        for at, layer in enumerate(model.model.layers)
    ]
    logits = []
    with torch.no_grad():
        window = window or context_len
        for start in range(0, context_len, window):
            piece = ids[:, start : min(start + window, context_len)]
            logits.append(model(piece, cache=cache, use_cache=True).logits)
        for hook in hooks:
            hook.remove()
        after_prefill = _cached(cache, model.config)
        for at in range(context_len, ids.shape[1] - 1):
            logits.append(model(ids[:, at : at + 1], cache=cache, use_cache=True).logits)
    return Trace(
        logits=_numpy(torch.cat(logits, dim=1)),
        hidden=np.stack([_numpy(torch.cat(pieces, dim=1)) for pieces in seen]),
        after_prefill=after_prefill,
        after_decode=_cached(cache, model.config),
    )


def _first(out: Any) -> Any:
    return out[0] if isinstance(out, tuple) else out


def _cached(cache: Any, config: Any) -> Cached:
    layer_types, latent = config.layer_types, hasattr(config, "kv_lora_rank")
    full = [layer for layer, t in zip(cache.layers, layer_types, strict=True) if t[0] == "f"]
    linear = [layer for layer, t in zip(cache.layers, layer_types, strict=True) if t[0] == "l"]
    keys = [_numpy(layer.keys).swapaxes(1, 2) for layer in full]
    values = [_numpy(layer.values).swapaxes(1, 2) for layer in full]
    if latent:  # the vendor's "keys" are the latent, its "values" the key that heads share
        keys, values = [np.concatenate(p, -1) for p in zip(keys, values, strict=True)], keys
    return Cached(
        # The vendor keeps [B, G, S, H] and [B, C, 4]: the last input is the step's own, and the
        # next step needs only the three that follow the first.
        keys=np.stack(keys),
        values=np.stack(values),
        conv=np.stack([_numpy(layer.conv_states[0])[..., 1:].swapaxes(1, 2) for layer in linear]),
        state=np.stack([_numpy(layer.recurrent_states[0]) for layer in linear]),
    )


def _numpy(x: Any) -> np.ndarray:
    """A float32 copy: the vendor writes into its cache tensors in place."""
    return np.array(x.detach().float().numpy())
