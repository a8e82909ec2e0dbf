"""Numbers and datapoints in the form that the page reads: few bytes each, and never markup.

Vectors are kept in steps of 1/127 of their largest entry: what a picture shows, in a quarter of the
space. A page reads them with `decode` in app.js.
"""

import base64
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

MOST_ENTRIES = 4096
"""Of a datapoint with more entries, the first so many are shown."""
MOST_TOKENS = 64
"""Of a longer text, so many tokens around the position in question are shown."""


def number(value: float | None, digits: int = 5) -> float | None:
    """A number as JSON can hold it, with so many significant digits; None for what is not finite."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")


def as_bytes(values: Tensor) -> str:
    """Numbers from 0 to 1 as bytes, 0 to 255."""
    return _base64((values.float().clamp(0, 1) * 255).round().to(torch.uint8).numpy())


def quantised(values: Tensor) -> dict[str, Any]:
    """Any vector as signed bytes and what 127 of them is."""
    flat = torch.nan_to_num(values.detach().float().flatten().cpu())
    largest = float(flat.abs().max()) if len(flat) else 0.0
    steps = (flat / (largest or 1.0) * 127).round().to(torch.int8)
    return {"n": len(flat), "max": number(largest), "q": _base64(steps.numpy())}


def sparse(values: Tensor, most: int) -> dict[str, Any]:
    """The largest entries of a long vector, by their index."""
    flat = torch.nan_to_num(values.detach().float().flatten().cpu())
    if len(flat) <= most:
        return quantised(flat)
    chosen = flat.abs().topk(most).indices.sort().values
    return {**quantised(flat[chosen]), "n": len(flat), "at": chosen.tolist()}


def _base64(values: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode("ascii")


def datapoint(x: Any, position: tuple[int, ...]) -> dict[str, Any]:
    """A datapoint for people: numbers, an image, tokens with one of them marked."""
    if isinstance(x, Mapping):
        x = next((v for v in x.values() if isinstance(v, Tensor)), None)
    elif isinstance(x, tuple | list):
        x = next((v for v in x if isinstance(v, Tensor)), None)
    if not isinstance(x, Tensor):
        return {"kind": "other"}
    x = x.detach().cpu()
    if not x.is_floating_point() and not x.is_complex() and x.dtype != torch.bool:
        tokens = x.flatten().tolist()
        at = position[0] if position else 0
        start = max(0, min(at - MOST_TOKENS // 2, len(tokens) - MOST_TOKENS))
        return {"kind": "tokens", "tokens": tokens[start : start + MOST_TOKENS], "start": start}
    x = x.real if x.is_complex() else x
    image = x.dim() in (2, 3) and min(x.shape[-2:]) >= 4 and (x.dim() == 2 or x.shape[0] in (1, 3))
    kept = x.flatten()[:MOST_ENTRIES]
    shape = list(x.shape[-2:]) if image and x.numel() <= MOST_ENTRIES else None
    return {"kind": "image" if shape else "row", "shape": shape, **quantised(kept)}


def as_json(values: Any) -> str:
    """JSON that can stand inside a script element: no character of it can end or open anything."""
    text = json.dumps(values, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
