"""The output head of a language model as a product of two thin matrices, the best one in the metric of the data.

Logits are z = W h + b with W (V, D). Softmax ignores what is equal for all tokens, so the rows of W are centred; then,
with h of mean mu and covariance Sigma, the rank-r map with the least E||(W - U P)(h - mu)||^2 is

    P = v^T Sigma^-1/2        U = W Sigma^1/2 v,

with v (D, r) the leading eigenvectors of Sigma^1/2 W^T W Sigma^1/2. The error is the sum of the other eigenvalues, and
the bias U P mu corrects the mean.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from corp.numerics.affine import Folded
from corp.numerics.linalg import energy_in, mean_diagonal

FLOOR = 1e-9  # relative; a smaller variance of the hidden state in a direction counts as zero


class Spectrum(NamedTuple):
    """The leading directions of an output head, best first, and the energy of the logits along each."""

    to: Tensor  # (D, D), P of every rank: its first r rows
    back: Tensor  # (D, D), Sigma^1/2 v: U = W back[:, :r]
    energies: Tensor  # (D,)


class LowRank(NamedTuple):
    """z ~ U (P h) + b."""

    P: Tensor  # (r, D)
    U: Tensor  # (V, r)
    b: Tensor  # (V,)


def output_spectrum(W: Tensor, cov: Tensor) -> Spectrum:
    """The solutions of all ranks at once; W (V, D), cov (D, D) in float64."""
    centred = W - W.mean(0)
    values, vectors = torch.linalg.eigh(cov)
    values = values.clamp(min=FLOOR * max(mean_diagonal(cov), torch.finfo(cov.dtype).tiny))
    half, inverse = (vectors * values**power @ vectors.mT for power in (0.5, -0.5))
    energies, v = torch.linalg.eigh(half @ (centred.mT @ centred) @ half)
    v = v.flip(1)
    return Spectrum(v.mT @ inverse, half @ v, energies.flip(0).clamp(min=0))


def low_rank(linear: Folded, mean: Tensor, spectrum: Spectrum, rank: int) -> LowRank:
    """The head of this rank; its logits are shifted by one number per token, which softmax ignores."""
    W = linear.W - linear.W.mean(0)
    P, U = spectrum.to[:rank], W @ spectrum.back[:, :rank]
    return LowRank(P, U, linear.b + W @ mean - U @ (P @ mean))


def output_error(linear: Folded, made: LowRank, mean: Tensor, cov: Tensor) -> float:
    """E||z - U P h - b||^2 up to one number per token, exactly, for any low-rank head."""
    D = linear.W - made.U @ made.P
    D = D - D.mean(0)
    bias = D @ mean + linear.b - made.b
    return energy_in(D, cov) + float((bias - bias.mean()).square().sum())
