# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""Which axis is which through transposes and reshapes.

A `Layout` says, for every axis of an array, which atoms it is made of: an atom is an axis that no
reshape seen so far takes apart. A merged axis (heads = key heads x group) holds several atoms; an
axis of length one holds none. When a reshape splits an atom, every layout that `Axes` knows is
refined.
"""

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp

Layout = list[list[int]]


class Axes:
    """The atoms of one pattern, their sizes, and the layouts made of them."""

    def __init__(self) -> None:
        """Starts with no atoms."""
        self.sizes: list[int] = []
        self._layouts: list[Layout] = []

    def atom(self, size: int) -> int:
        """Returns a new atom."""
        self.sizes.append(size)
        return len(self.sizes) - 1

    def keep(self, layout: Iterable[Iterable[int]]) -> Layout:
        """Returns the layout as one that later splits refine."""
        kept = [list(axis) for axis in layout]
        self._layouts.append(kept)
        return kept

    def fresh(self, shape: Sequence[int]) -> Layout:
        """Returns a layout of new atoms, one for each axis longer than one."""
        return self.keep([[self.atom(n)] if n > 1 else [] for n in shape])

    def split(self, atom: int, outer: int) -> tuple[int, int]:
        """Takes an atom apart into an outer one of the given size and the rest, everywhere."""
        parts = self.atom(outer), self.atom(self.sizes[atom] // outer)
        for layout in self._layouts:
            for axis in layout:
                if atom in axis:
                    at = axis.index(atom)
                    axis[at : at + 1] = parts
        return parts

    def reshape(self, layout: Layout, shape: Sequence[int]) -> Layout | None:
        """Returns the layout after a reshape to `shape`, or None if axes do not line up."""
        left = [atom for axis in layout for atom in axis]
        out: Layout = []
        for size in shape:
            axis: list[int] = []
            while size > 1:
                if not left:
                    return None
                n = self.sizes[left[0]]
                if size % n == 0:
                    axis.append(left.pop(0))
                    size //= n
                elif n % size == 0:
                    left[:1] = self.split(left[0], size)
                else:
                    return None
            out.append(axis)
        return None if left else self.keep(out)

    def shape(self, layout: Layout) -> list[int]:
        """Returns the length of every axis of the layout."""
        return [self.size(axis) for axis in layout]

    def size(self, atoms: Iterable[int]) -> int:
        """Returns the product of the atoms' sizes."""
        product = 1
        for atom in atoms:
            product *= self.sizes[atom]
        return product

    def arrange(self, x: jax.Array, layout: Layout, wanted: Layout) -> jax.Array:
        """Returns `x` of the given layout in the wanted one; atoms that it lacks become length one.

        An axis of `wanted` of which `x` has some atoms but not all is broadcast to its full length.
        """
        have = [atom for axis in layout for atom in axis]
        order = [atom for axis in wanted for atom in axis]
        x = x.reshape([self.sizes[atom] for atom in have])
        x = x.transpose([have.index(atom) for atom in order if atom in have])
        partial = [any(a in have for a in axis) for axis in wanted]
        whole = [a for axis, some in zip(wanted, partial, strict=True) if some for a in axis]
        x = x.reshape([self.sizes[a] if a in have else 1 for a in whole])
        x = jnp.broadcast_to(x, [self.sizes[a] for a in whole])
        return x.reshape(
            [self.size(a) if some else 1 for a, some in zip(wanted, partial, strict=True)]
        )
