"""Which directions of every head's values to keep: a basis per head in which the leading ones carry the output.

The output projection computes y = W z from z = (z_1 ... z_H), every head's averaged values, with covariance Sigma. The
contribution of a head does not depend on its basis: for any invertible T_h, T_h z_h and W_h T_h^-1 give the same. So
the heads are rotated first, and then dimensions are removed and predicted from the others as in an MLP.

For a single head the best r directions are the leading ones of W_h Sigma_h^1/2. But heads share the projection, and the
compensation uses all of them: given what the others keep (S), the directions of head h that explain most of the rest
are the leading ones of K C^-1/2, with

    C = Sigma_hh - Sigma_hS Sigma_SS^-1 Sigma_Sh        K = W Sigma_:h - W Sigma_:S Sigma_SS^-1 Sigma_Sh.

A sweep does that for one head after the other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from corp.numerics.linalg import mean_diagonal, solve_raised

SWEEPS = 1  # more make no measurable difference
LEAST_RIDGE = 1e-6  # keeps directions without variance finite; only for the choice, the fit has its own ridge


class Basis(NamedTuple):
    """T of every value head, leading directions first, and its inverse; a head's directions are uncorrelated."""

    to: Tensor  # (G, d, d)
    back: Tensor  # (G, d, d)


class Rotated(NamedTuple):
    """The output projection and the moments of its input, in another basis."""

    W: Tensor  # (o, H d)
    mean: Tensor  # (H d,)
    cov: Tensor  # (H d, H d)


def value_basis(W: Tensor, cov: Tensor, heads: int, groups: int, keep: int, *, ridge: float) -> Basis:
    """The basis in which every head keeps its first `keep` directions; W (o, H d), cov (H d, H d), float64.

    Query heads that share a value head (groups < heads) share its basis; their errors are added.
    """
    d, shared, ridge = len(cov) // heads, heads // groups, max(ridge, LEAST_RIDGE)
    own = cov.view(heads, d, heads, d).diagonal(dim1=0, dim2=2).permute(2, 0, 1)  # (H, d, d): Sigma_hh
    C = own.unflatten(0, (groups, shared)).mean(1)
    K = W.view(len(W), heads, d).transpose(0, 1) @ C.repeat_interleave(shared, dim=0)  # (H, o, d)
    basis = _leading(C, (K.mT @ K).unflatten(0, (groups, shared)).sum(1), ridge)
    for _ in range(SWEEPS if keep < d and groups > 1 else 0):
        basis = _sweep(W, cov, basis, heads, keep, ridge)
    return basis


def rotate(W: Tensor, mean: Tensor, cov: Tensor, basis: Basis, heads: int) -> Rotated:
    """The layer on rotated inputs: W T^-1, T mu, T Sigma T^T."""
    shared = heads // len(basis.to)
    to, back = (part.repeat_interleave(shared, dim=0) for part in basis)  # (H, d, d)
    D, d = len(mean), to.shape[-1]
    half = (to @ cov.view(heads, d, D)).view(D, D)
    whole = (to @ half.mT.reshape(heads, d, D)).view(D, D)
    W_h = W.view(len(W), heads, d).transpose(0, 1)  # (H, o, d)
    rotated = (W_h @ back).transpose(0, 1).reshape(len(W), D)
    return Rotated(rotated, (to @ mean.view(heads, d, 1)).view(D), whole.mT)


def kept_inputs(kept: list[Tensor], width: int, heads: int) -> Tensor:
    """The positions of every value head's kept dimensions among all inputs of the output projection."""
    shared = heads // len(kept)
    return torch.cat([h * width + kept[h // shared] for h in range(heads)])


def _sweep(W: Tensor, cov: Tensor, basis: Basis, heads: int, keep: int, ridge: float) -> Basis:
    """Choose every head's directions again, given what the others keep."""
    groups, d, _ = basis.to.shape
    shared = heads // groups
    to, back = (part.clone() for part in basis)
    W, _, cov = rotate(W, W.new_zeros(len(cov)), cov, basis, heads)
    cross = W @ cov  # (o, H d)
    places = torch.arange(heads * d, device=W.device).view(groups, shared, d)
    for g in range(groups):
        members = range(g * shared, (g + 1) * shared)
        S = torch.cat([places[:g], places[g + 1 :]])[..., :keep].flatten()
        inside = places[g].flatten()
        lam = ridge * mean_diagonal(cov[S[:, None], S])
        X = solve_raised(cov[S[:, None], S], cov[S[:, None], inside], lam)  # (S, R d)
        K = cross[:, inside] - cross[:, S] @ X
        C = cov[inside[:, None], inside] - cov[inside[:, None], S] @ X
        parts = [slice(i * d, (i + 1) * d) for i in range(shared)]
        pooled = torch.stack([C[part, part] for part in parts]).mean(0)
        gram = sum((K[:, part].mT @ K[:, part] for part in parts), K.new_zeros(d, d))
        # A rotation with the same leading subspaces: repeated scaling would accumulate rounding errors.
        Q = torch.linalg.qr(_leading(pooled, gram, ridge).to.mT).Q
        to[g], back[g] = Q.mT @ to[g], back[g] @ Q
        for h in members:
            part = slice(h * d, (h + 1) * d)
            cov[part] = Q.mT @ cov[part]
            cov[:, part] = cov[:, part] @ Q
            cross[:, part] = cross[:, part] @ Q
    return Basis(to, back)


def _leading(C: Tensor, gram: Tensor, ridge: float) -> Basis:
    """Directions P that maximise tr(P gram P^T (P C P^T)^-1), best first, with unit variance under C; (..., d, d) each.

    If nothing varies, they are those of the identity.
    """
    values, vectors = torch.linalg.eigh(C)
    values = values.clamp(min=0)
    mean = values.mean(-1, keepdim=True)
    values = values + torch.where(mean > 0, ridge * mean, 1.0)
    root, inverse = ((vectors * values[..., None, :] ** power) @ vectors.mT for power in (0.5, -0.5))
    U = torch.linalg.eigh(inverse @ gram @ inverse).eigenvectors.flip(-1)
    return Basis(U.mT @ inverse, root @ U)
