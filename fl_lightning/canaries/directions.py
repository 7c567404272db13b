"""Directions that canaries push in: orthonormal, random, and as cheap as one vector.

The d coordinates are dealt at random to m blocks; v_j has random signs on block j and is zero elsewhere, so

    <v_i, v_j> = 1[i = j],     all m products <u, v_j> cost O(d).

For any u that does not know the signs, <u, v_j> has mean 0 and variance ||u||^2 / d, as for any random direction.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.errors import PrivacyError
from fl_lightning.records import Vector


@dataclass(frozen=True)
class Directions:
    """m orthonormal directions in R^d.

    Attributes:
        block: the direction that each coordinate belongs to, int64 [d].
        entry: that direction's value there, +-1 / sqrt(size of the block), float64 [d].
        count: m.
    """

    block: Tensor
    entry: Tensor
    count: int

    def project(self, u: Vector) -> Tensor:
        """<u, v_j> for all j, float64 [m]; u is float64 on the CPU."""
        products = torch.zeros(self.count, dtype=torch.float64)
        return products.index_add_(0, self.block, u * self.entry)

    def rows(self, which: Sequence[int], factors: Sequence[float], like: Vector) -> Tensor:
        """factors[i] v_{which[i]}, [len(which), d], of `like`'s type and device."""
        table = [
            factor * torch.where(self.block == j, self.entry, 0.0) for j, factor in zip(which, factors, strict=True)
        ]
        return torch.stack(table).to(like) if table else like.new_zeros((0, len(like)))


def directions(count: int, dimension: int, rng: torch.Generator) -> Directions:
    """`count` directions in R^`dimension`, drawn from `rng`.

    Raises:
        PrivacyError: fewer coordinates than directions.
    """
    if count > dimension:
        raise PrivacyError(
            f"privacy.audit_canaries={count}: the model has {dimension} parameters only, and every canary needs a "
            "direction of its own; lower it"
        )
    block = torch.empty(dimension, dtype=torch.int64)
    block[torch.randperm(dimension, generator=rng)] = torch.arange(dimension) % count
    sizes = torch.bincount(block, minlength=count).double()
    signs = torch.randint(0, 2, (dimension,), generator=rng).double() * 2 - 1
    return Directions(block, signs / sizes[block].sqrt(), count)
