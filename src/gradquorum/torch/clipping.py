"""Gradients scaled down together to a norm."""

from __future__ import annotations

import math
from typing import Any

import torch

from gradquorum.norms import Norm

__all__ = ["scale_down"]


def scale_down(gradients: list[Any], max_norm: float) -> float:
    """Scale gradients in place so that their 2-norm, of all together, is `max_norm` at most; return what it was.

    If one is not finite, nothing is scaled.
    """
    numbers_of = [grad._values() if grad.is_sparse else grad for grad in gradients]
    norm = Norm.of(_norm_of(torch.view_as_real(each) if each.is_complex() else each) for each in numbers_of)
    factor = norm.factor(max_norm)
    if factor is not None and not math.isnan(factor):
        for each in numbers_of:
            each.mul_(factor)
    return float(norm)


def _norm_of(numbers_of: Any) -> Norm:
    norm = float(torch.linalg.vector_norm(numbers_of, dtype=torch.float64))
    if 1e-140 < norm < 1e140:
        return Norm(1.0, norm)
    largest = float(numbers_of.abs().max()) if numbers_of.numel() else 0.0  # its square may leave float64
    if largest == 0 or not math.isfinite(largest):
        return Norm(largest, 1.0)
    return Norm(largest, float(torch.linalg.vector_norm(numbers_of.double() / largest)))
