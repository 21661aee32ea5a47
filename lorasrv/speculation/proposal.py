"""Proposal: the draft tokens that a step may verify for one answer, a chain or a tree of several drafters' chains.

Source: merged token trees of SpecInfer (Miao et al. 2023, arXiv:2305.09781).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sgmv_kernels.metadata.draft_trees import ROOT


class Chain(NamedTuple):
    """Hold the tokens that one drafter proposes, each following the one before it."""

    drafter: str
    token_ids: Sequence[int]
    # For each token, the chance that it and those before it are right.
    survival: Sequence[float]


@dataclass(frozen=True, slots=True)
class Proposal:
    """Propose tokens for one answer: the likeliest first, none before its parent."""

    token_ids: tuple[int, ...] = ()
    # Index of each token's parent, or `ROOT`.
    parents: tuple[int, ...] = ()
    # For each token, the chance that it and those before it are right.
    survival: tuple[float, ...] = ()
    # The drafter of each token.
    drafters: tuple[str, ...] = ()

    @classmethod
    def merged(cls, chains: Iterable[Chain]) -> "Proposal":
        """Return the tree of all chains; a token that several propose at the same place has the best of its chances."""
        nodes = dict[tuple[int, int], int]()
        tokens, parents, survival, drafters = list[int](), list[int](), list[float](), list[str]()
        for drafter, token_ids, chances in chains:
            parent = ROOT
            for token, chance in zip(token_ids, chances, strict=True):
                node = nodes.setdefault((parent, token), len(tokens))
                if node == len(tokens):
                    tokens.append(token)
                    parents.append(parent)
                    survival.append(chance)
                    drafters.append(drafter)
                elif chance > survival[node]:
                    survival[node], drafters[node] = chance, drafter
                parent = node
        # A parent's chance is not below its child's, and sorting keeps the order of equal ones.
        order = sorted(range(len(tokens)), key=lambda node: -survival[node])
        place = {node: at for at, node in enumerate(order)} | {ROOT: ROOT}
        return cls(
            tuple(tokens[node] for node in order),
            tuple(place[parents[node]] for node in order),
            tuple(survival[node] for node in order),
            tuple(drafters[node] for node in order),
        )

    def first(self, count: int) -> "Proposal":
        """Return the first tokens."""
        return Proposal(self.token_ids[:count], self.parents[:count], self.survival[:count], self.drafters[:count])

    @property
    def is_chain(self) -> bool:
        """Return whether each token follows the one before it."""
        return all(parent == at - 1 for at, parent in enumerate(self.parents))


NO_PROPOSAL = Proposal()
