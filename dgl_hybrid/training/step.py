# SPDX-License-Identifier: Apache-2.0
"""What one epoch of a loader is made of on this rank: its blocks, the identity of every row, and the loss weight."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dgl_hybrid.errors import BlockError
from dgl_hybrid.exchange.communicator import Communicator
from dgl_hybrid.graph.layer_block import LayerBlock
from dgl_hybrid.graph.untraced import untraced
from dgl_hybrid.ops import EdgeDropout
from dgl_hybrid.training.edge_keys import EdgeKeys
from dgl_hybrid.training.loss import LossWeight

Uses = tuple[bool, bool, set[int], bool, bool]
"""What an outermost module call has done so far."""


@dataclass(frozen=True, kw_only=True)
class RowCounts:
    """How many rows there are, on any rank. What a number says must not differ by rank, or some would raise, draw or
    exchange alone; so it does not matter on which rank it is that of a level.
    """

    of_levels: frozenset[int]
    """Vertices of a level, all or those that a rank owns: where a tensor has so many rows, ranks find out together what
    they are."""
    telling: frozenset[int]
    """Vertices of a level, or edges of a layer, of which every rank has more than one: whoever draws so many numbers,
    draws them for rows. A rank with a borrowed seed has one row, and models draw one number for other reasons."""
    unclear: frozenset[int]
    """Numbers on this rank of rows that could be, on some rank, both vertices of a level and edges of a layer. Each
    rank has its own, but of the same rows: so ranks that have so many find out together what they are."""

    @staticmethod
    def gather(
        communicator: Communicator, levels: Sequence[int], owned: Sequence[int], edges: Sequence[int]
    ) -> RowCounts:
        """Learns them from all ranks. Collective.

        Args:
            levels: (L + 1,) rows of each level on this rank.
            owned: (L + 1,) those of them that are no replicas.
            edges: (L,) of each layer.
        """
        ranks = communicator.gather_ints([*levels, *edges, *owned])
        columns = list(zip(*ranks, strict=True))
        num_levels, num_told = len(levels), len(levels) + len(edges)
        telling = [count for column in columns[:num_told] if min(column) > 1 for count in column]
        of_levels = [count for column in (*columns[:num_levels], *columns[num_told:]) for count in column]
        are_unclear = _are_unclear([row[:num_told] for row in ranks], num_levels)
        unclear = (
            count for count, is_unclear in zip(ranks[communicator.rank], are_unclear, strict=False) if is_unclear
        )
        return RowCounts(of_levels=frozenset(of_levels), telling=frozenset(telling), unclear=frozenset(unclear))


def _are_unclear(ranks: Sequence[Sequence[int]], num_levels: int) -> list[bool]:
    """Returns of all levels, then of all layers, whether ranks have to ask each other which of them rows are.

    A rank knows that rows are one of those that are as many on it. Another rank knows the same of others, so that all
    that are as many as any of them, on any rank, are taken together.
    """
    groups = list(range(len(ranks[0])))
    for counts in ranks:
        first: dict[int, int] = {}
        for which, count in enumerate(counts):
            joined, group = groups[first.setdefault(count, which)], groups[which]
            groups = [joined if other == group else other for other in groups]
    of_levels, of_layers = set(groups[:num_levels]), set(groups[num_levels:])
    return [group in of_levels and group in of_layers for group in groups]


_counts_of_blocks: weakref.WeakKeyDictionary[EdgeKeys, RowCounts] = weakref.WeakKeyDictionary()
"""By what is made once with the blocks of a plan, on all ranks."""


@untraced("note_use")
@dataclass(kw_only=True)
class Step:
    """One yield of a loader; alive until its next, or for as long as somebody holds one of its blocks.

    Rows of every level are prefixes of one permutation, so a tensor's number of rows tells which vertices they are.

    Blocks hold their step, so it only refers to them: what holds itself would stay until Python looks for cycles.
    """

    communicator: Communicator
    level_sizes: tuple[int, ...]
    owned: Tensor
    """(|C_0|,) bool: rows that are not replicas."""
    blocks: InitVar[Sequence[LayerBlock]]
    node_keys: Tensor
    """(|C_0|,) int64: the id of every row that does not depend on the partition (original ids, where known)."""
    edge_keys: EdgeKeys
    """Likewise of the edges of each layer."""
    is_first_draw: bool
    """No step of these blocks has drawn random numbers yet: ranks make sure that they draw on the same rows."""
    loss_weight: LossWeight
    """What a gradient entering the model's output is multiplied by, so that DDP's average is the global mean."""
    seed: int
    """Of the replicated randomness; equal on all ranks."""
    num_vertices: int
    """Of the whole graph."""
    number: int
    """Counts the training steps of the loader; masks differ from step to step."""
    with_gradients: bool = True
    """It was yielded where gradients are taken."""
    is_over: bool = False
    """The loader's epoch has ended."""
    is_left: bool = False
    """The script has taken the batch out of the loop (`next(iter(loader))`, `list(loader)`), and may use it yet."""
    is_replaced: bool = False
    """The loader has yielded another step since."""
    dense_below: int = 0
    """Levels below this one must hold every vertex: such a module has normalised their rows."""
    normed_below: int = 0
    """The same by modules of calls that were given the blocks, which the trace of a model sees, as a rule; at least: of
    levels with equally many rows it is the highest."""
    on_call: Callable[[Step, nn.Module, tuple[Any, ...], dict[str, Any]], None] | None = None
    """Told of each outermost module call that used the step's last block."""
    on_inner_call: Callable[[Step, nn.Module, nn.Module, tuple[Any, ...], dict[str, Any]], None] | None = None
    """Told of each module call inside of another one in which the blocks of all layers were used, as it ends: of the
    outermost module first."""
    on_use: Callable[[Step, LayerBlock, Sequence[Tensor]], None] | None = None
    """Told whenever a block is used, and of what is read besides its fields."""
    block_used: bool = False
    last_block_used: bool = False
    runs_on: torch.device | None = None
    """Where the block that was used first lies, which the script may have moved."""
    layers_used: set[int] = field(default_factory=set)
    """Whose blocks the outermost module call has used."""
    thread: threading.Thread = field(default_factory=threading.current_thread)
    """Which took the blocks from the loader."""
    was_trained: bool = False
    """A module has used the last block where gradients are taken."""
    has_gone_back: bool = False
    """Gradients have come to what a module made of the last block, or were taken inside of that module."""
    was_weighted: bool = False
    """The loss weight was applied to something that had a gradient: what a module made of the last block."""
    users: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    """Outermost modules that have used blocks, or were given them, where gradients are taken."""
    trained: dict[int, weakref.ref[Tensor]] = field(default_factory=dict)
    """Their parameters, by `id`: such a module may be made for a call, by `torch.compile`, say."""
    has_trained_fields: bool = False
    """Outside of modules, blocks have read what needs a gradient."""
    was_used_besides: bool = False
    """Blocks were used where gradients are taken, by what has none itself: what comes after may."""
    was_backed: bool = False
    """The outermost module call has backed a loss itself."""
    was_differentiated: bool = False
    """It has taken gradients of its own, after the last block was used, that are no part of a graph."""
    num_random_calls: int = 0
    unweighted_functions: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    """Contexts of autograd functions (reentrant checkpoints) in whose forward an outermost module was called: its
    output needed no gradient, so it is weighted when their backward calls it again."""
    _call_of_token: dict[int, int] = field(default_factory=dict)
    _agreed: dict[tuple[int, int], tuple[bool, frozenset[int]]] = field(default_factory=dict)
    """By random call and number of rows, what ranks have found out together: whether these
    can be those of a level, and of which layers they can be the edges."""
    _edge_results: dict[int, tuple[weakref.ref[Tensor], int]] = field(default_factory=dict)
    """By `id`, with the layer whose edges their rows are."""
    _keys_on: dict[tuple[torch.device, int], Tensor] = field(default_factory=dict)
    _counts: RowCounts | None = None
    _blocks: list[weakref.ref[LayerBlock]] = field(init=False)
    _used: list[weakref.ref[LayerBlock]] = field(default_factory=list)
    """The block that was used last, then the one of this step that it is or was copied from."""

    def __post_init__(self, blocks: Sequence[LayerBlock]) -> None:
        self._blocks = [weakref.ref(block) for block in blocks]

    def note_norm(self, x: Tensor) -> None:
        """Takes note of rows over which batch norm runs, inside of a call that was given the blocks."""
        levels = [level for level, size in enumerate(self.level_sizes[:-1]) if size == len(x)]
        self.normed_below = max(self.normed_below, 1 + max(levels, default=-1))

    def held_blocks(self) -> list[LayerBlock]:
        """Returns those that are still held, one a layer, first layer first."""
        return [block for block in (ref() for ref in self._blocks) if block is not None]

    @property
    def is_retired(self) -> bool:
        """Whether its plan was replaced by another one."""
        return any(block.is_retired for block in self.held_blocks())

    @property
    def current_block(self) -> LayerBlock | None:
        """The block that was used last. A layer's copy of one (`local_var`) is gone after the layer: then that one."""
        return next((block for block in (used() for used in self._used) if block is not None), None)

    def note_use(self, block: LayerBlock, operands: Sequence[Tensor] = ()) -> None:
        self._used = [weakref.ref(block), self._blocks[block.layer - 1]]
        self.block_used = True
        if self.runs_on is None:
            self.runs_on = block.device
        self.last_block_used |= self.is_last(block)
        self.layers_used.add(block.layer)
        if self.on_use is not None:
            self.on_use(self, block, operands)

    def note_training_use(self, module: nn.Module | None, read: Callable[[], Iterable[Tensor]]) -> None:
        """Remembers who uses a block where gradients are taken, or is given the blocks, for `misses_weight`.

        Args:
            module: The outermost that runs.
            read: Returns its parameters; of no module, what the block reads.
        """
        if self.loss_weight.is_one or (module is not None and module in self.users):
            return
        to_train = [x for x in read() if x.requires_grad]
        self.was_used_besides |= not to_train
        if module is None:
            self.has_trained_fields |= bool(to_train)
        else:
            self.users.add(module)
            self.trained.update((id(x), weakref.ref(x)) for x in to_train)

    def misses_weight(self, parameters: Iterable[Tensor], *, is_latest: bool) -> bool:
        """Whether gradients of this step that these parameters may have lack the loss weight.

        Args:
            is_latest: No other step was yielded since.
        """
        if self.loss_weight.is_one or self.was_weighted or self.is_replaced or not (is_latest or not self.is_over):
            return False
        if self.has_trained_fields or (self.was_used_besides and not self.is_over):
            return True
        return any((known := self.trained.get(id(x))) is not None and known() is x for x in parameters)

    @property
    def is_done(self) -> bool:
        """Whether its epoch is over, and gradients have gone back."""
        return self.is_over and self.has_gone_back

    def begin_call(self) -> None:
        """An outermost module is called: none of the blocks is used by it yet."""
        self.set_uses((False, False, set(), False, False))
        for block in (ref() for ref in self._blocks):
            if block is not None:
                block.begin_call()

    def uses(self) -> Uses:
        """Returns what the outermost module call has done so far, for `set_uses` once another one has ended."""
        return self.block_used, self.last_block_used, self.layers_used, self.was_backed, self.was_differentiated

    def set_uses(self, uses: Uses) -> None:
        self.block_used, self.last_block_used, self.layers_used, self.was_backed, self.was_differentiated = uses

    @property
    def all_blocks_used(self) -> bool:
        """Whether the outermost module call has used the block of every layer."""
        return len(self.layers_used) == len(self._blocks)

    def is_last(self, block: LayerBlock) -> bool:
        """Whether that is the block of the last layer."""
        return block.layer == len(self._blocks)

    def note_edge_result(self, result: Tensor, layer: int) -> None:
        self._edge_results[id(result)] = weakref.ref(result), layer

    def knows_token(self, token: int) -> bool:
        """Whether a random call of this step has drawn that number before."""
        return token in self._call_of_token

    def next_random_call(self) -> int:
        """Returns the index of this random call within the step; a recomputation gets the index of the original.

        Activation checkpointing restores the random number generator before it runs a forward again. A number drawn
        from that generator is therefore the same in both runs, and tells the second that it is one.
        """
        token = _draw_token()
        if token not in self._call_of_token:
            self._call_of_token[token] = self.num_random_calls
            self.num_random_calls += 1
        return self._call_of_token[token]

    def edge_dropout(self, block: LayerBlock, p: float) -> EdgeDropout:
        """Draws attention dropout inside a fused layer: the mask that `F.dropout` of its weights would get. Collective
        where the keys of edges are not known yet.
        """
        call_index = self.next_random_call()
        self._agree(False, frozenset([block.layer]), (call_index, block.structure.num_edges))
        self.edge_keys.ask(True, agreed=True)
        return EdgeDropout.from_call(
            p,
            seed=self.seed,
            step=self.number,
            call_index=call_index,
            edge_keys=self._edge_keys_of(block, block.device),
        )

    def draw_nothing(self, block: LayerBlock) -> None:
        """Takes part in a random call that other ranks make on edges of a layer, of which this one has none. Collective
        where `keys_of` is.

        Raises:
            BlockError: On all ranks: those are not the edges of the layer.
        """
        call_index, count = self.next_random_call(), block.structure.num_edges
        asked = frozenset([block.layer])
        _, layers = self._agree(False, asked, (call_index, count), is_unclear=self._is_unclear(count))
        if not layers:  # as the ranks do that have such rows
            raise BlockError(
                f"a random call inside layer {block.layer}: on some rank its tensor does not have one row for each of "
                f"the layer's edges, so its randomness cannot be made equal on all ranks. Apply it to tensors with one "
                f"row for each vertex or edge."
            )
        self.edge_keys.ask(True, agreed=True)

    def _is_unclear(self, count: int) -> bool:
        return self._counts is not None and count in self._counts.unclear

    def _agree(
        self, may_be_level: bool, layers: frozenset[int], call: tuple[int, int] | None, *, is_unclear: bool = False
    ) -> tuple[bool, frozenset[int]]:
        """Returns whether the rows of a random call can be those of a level on all ranks, and of which layers they can
        be the edges. Collective in the first step that draws, and where that is unclear on any rank; not when a call is
        repeated, which one rank may do alone.

        Args:
            may_be_level, layers: The same by what this rank knows.
            call: The index of the random call and the number of rows; None: it is not repeated.
        """
        known = may_be_level, layers
        if self.communicator.world_size == 1 or not (self.is_first_draw or is_unclear):
            return known
        if call is not None and call in self._agreed:
            return self._agreed[call]
        numbers = range(1, len(self._blocks) + 1)
        told = self.communicator.gather_ints([int(may_be_level), *(int(layer in layers) for layer in numbers)])
        of_level, *of_layers = (all(column) for column in zip(*told, strict=True))
        known = of_level, frozenset(layer for layer, is_that in zip(numbers, of_layers, strict=True) if is_that)
        if call is not None:
            self._agreed[call] = known
        return known

    def _edge_keys_of(self, block: LayerBlock, device: torch.device) -> Tensor:
        of_layer = self.edge_keys.of_layer(block.layer)
        keys = self._keys_on.get((device, id(of_layer)))
        if keys is None:  # on a GPU a copy, so once an epoch
            keys = self._keys_on[device, id(of_layer)] = of_layer.wide().to(device)
        return keys[: block.structure.num_edges]

    def _node_keys_of(self, rows: Tensor) -> Tensor:
        if self.node_keys.device != rows.device:  # the script has moved its blocks and rows itself: a copy, once
            self.node_keys = self.node_keys.to(rows.device)
        return self.node_keys[: len(rows) if rows.dim() else 0]

    def learn_counts(self, blocks: Iterable[LayerBlock]) -> None:
        """Learns how many rows other ranks have. Collective in the first step of the blocks of a plan."""
        counts = _counts_of_blocks.get(self.edge_keys)
        if counts is None:
            owned = [int(self.owned[:size].sum()) for size in self.level_sizes]
            edges = [block.structure.num_edges for block in blocks]
            counts = _counts_of_blocks[self.edge_keys] = RowCounts.gather(
                self.communicator, self.level_sizes, owned, edges
            )
        self._counts = counts

    def is_level(self, num_rows: int) -> bool:
        return num_rows in self.level_sizes

    @property
    def takes_pieces(self) -> bool:
        """Whether a module that is given none of the blocks may be a piece of a model that works on them: not after the
        epoch, and if it trains, not of a step that only evaluates. Else whatever the script does besides (sampled
        training, say) would ask other ranks what its rows are.
        """
        return not self.is_over and (self.with_gradients or not torch.is_grad_enabled())

    def level_of(self, num_rows: int) -> int | None:
        """Returns the (lowest) level whose vertices so many rows are on all ranks; None: of none. Collective, where
        that is possible.

        Not each rank by its own sizes: those of one rank may be a number that means something else, and equals no size
        on other ranks; that rank would wait for the others in batch norm, or count one dropout more. So wherever the
        number is a size on any rank, all find out together. The rows of a level are that on all ranks, and so is a
        number that is the same on all. Ranks wait for each other in vain only where they have different numbers of
        something else, some of which are sizes by chance. Nobody asks where blocks are known to be in use.
        """
        return levels_of([self], num_rows)[0]

    def may_be_of_level(self, num_rows: int) -> bool:
        """Whether so many rows are those of a level on any rank."""
        assert self._counts is not None, "a step must be followed before its rows are asked for"
        return num_rows in self._counts.of_levels

    def has_rows(self, count: int) -> bool:
        """Whether so many rows could be the vertices of a level or the edges of a layer; the same on all ranks, for the
        same number and for the rows of the same level.
        """
        return self._counts is not None and count in self._counts.telling

    def possible_rows(self, x: Tensor) -> list[int]:
        """Returns of each level, then of each layer, whether this rank may have so many vertices or edges: 0 or 1."""
        block, count = self.current_block, len(x) if x.dim() else 0
        _, layer = self._edge_result(x)
        if block is not None and block.is_dry_run:
            layer = block.layer
        levels = [int(size == count and not layer) for size in self.level_sizes]
        edges = dict(self._counts_of_edges())
        layers = [int(number == layer if layer else edges.get(number) == count) for number in range(1, len(levels))]
        return [*levels, *layers]

    def has_same_rows(self, other: Step, count: int, *, by_key: bool) -> bool:
        """Whether the first rows of levels of both steps are those of the same vertices on this rank.

        Args:
            by_key: Else it is enough that the same of them are no replicas.
        """
        if not torch.equal(self.owned[:count].cpu(), other.owned[:count].cpu()):
            return False
        return not by_key or torch.equal(self.node_keys[:count].cpu(), other.node_keys[:count].cpu())

    def _edge_result(self, x: Tensor) -> tuple[LayerBlock | None, int]:
        """Returns the block and the number of the layer that has made `x` of its edges; None and 0, if none has."""
        result, layer = self._edge_results.get(id(x), (None, 0))
        block = self._blocks[layer - 1]() if result is not None and result() is x else None
        return block, 0 if block is None else layer

    def keys_of(self, x: Tensor, what: str, *, call_index: int | None = None) -> Tensor:
        """Returns the (n,) keys of the vertices or edges that the rows of `x` are. Collective in the first step that
        draws, and where counts of some rank leave open which of both they are.

        Args:
            call_index: Of the random call that this is for. When that is repeated, ranks know what its rows are.

        Raises:
            BlockError: If its rows are neither those of a level nor the edges of the layer in use, or could be both; on
                all ranks, where this is collective.
        """
        block = self._block_of_edges(x, what, call_index)
        self.edge_keys.ask(block is not None, agreed=True)
        return self._edge_keys_of(block, x.device) if block is not None else self._node_keys_of(x)

    def _block_with_edges(self, count: int) -> LayerBlock | None:
        """Returns the block in use, or the one after it if so many edges are that one's: fields of edges go through
        modules before their layer reads them, which is the first use of its block. Else one that has so many: a forward
        may encode the edges of all layers first, be the second of its epoch, or be repeated in backward, last layer
        first. Layers of as many edges have the same ones, as the destinations of each are the first of the one below.
        """
        block = self.current_block
        if block is not None and block.structure.num_edges == count:
            return block
        following = 0 if block is None else block.layer
        others = (ref() for ref in (*self._blocks[following:], *self._blocks[:following]))
        return next((x for x in others if x is not None and x.structure.num_edges == count), block)

    def _block_of_edges(self, x: Tensor, what: str, call_index: int | None) -> LayerBlock | None:
        """Returns the block whose edges the rows of `x` are, None if they are the vertices of a level."""
        num_rows = len(x) if x.dim() else 0
        of_layer, layer = self._edge_result(x)
        if of_layer is not None:
            may_be_level, layers = False, frozenset([layer])
        else:
            may_be_level = self.is_level(num_rows)
            layers = frozenset(number for number, count in self._counts_of_edges() if count == num_rows)
        call = None if call_index is None else (call_index, num_rows)
        may_be_level, layers = self._agree(may_be_level, layers, call, is_unclear=self._is_unclear(num_rows))
        # Inside a layer three dimensions are heads of vertices or of edges; outside one, rows are vertices.
        block = self.current_block
        is_in_layer = x.dim() > 2 and block is not None and block.is_in_scope
        is_either = may_be_level and block is not None and block.layer in layers
        if is_either and is_in_layer and self.communicator.world_size > 1:
            raise BlockError(
                f"{what}: rows of shape {tuple(x.shape)} could be the vertices of a level or the edges of the layer in "
                f"use, on every rank. Apply it outside the layer, or give the loader one node more or less."
            )
        if may_be_level:
            return None
        if layers:
            return of_layer if of_layer is not None else self._block_with_edges(num_rows)
        raise BlockError(
            f"{what} inside the model: a tensor of shape {tuple(x.shape)} has neither the rows of a level "
            f"{sorted(set(self.level_sizes))} nor those of a layer's edges, or not on every rank, so its randomness "
            f"cannot be made equal on all ranks. Apply it to tensors with one row for each vertex or edge."
        )

    def _counts_of_edges(self) -> Iterator[tuple[int, int]]:
        """Yields layers, and how many edges each has."""
        for number, block in enumerate((ref() for ref in self._blocks), 1):
            if block is not None:
                yield number, block.structure.num_edges


def levels_of(steps: Sequence[Step], num_rows: int) -> list[int | None]:
    """Returns `Step.level_of` of several steps. Collective, where that is possible for any of them: rows of one have
    numbers that are sizes of another on some ranks only.
    """
    told = [[int(size == num_rows) for step in steps for size in step.level_sizes]]
    communicator = steps[0].communicator
    if communicator.world_size > 1:
        if not any(step.may_be_of_level(num_rows) for step in steps):
            return [None] * len(steps)
        told = communicator.gather_ints(told[0])
    everywhere = iter([all(column) for column in zip(*told, strict=True)])
    of_steps = ([level for level in range(len(step.level_sizes)) if next(everywhere)] for step in steps)
    return [min(levels, default=None) for levels in of_steps]


def peek_token() -> int:
    """Returns the number that the next random call will draw."""
    before = torch.get_rng_state()
    token = _draw_token()
    torch.set_rng_state(before)
    return token


def _draw_token() -> int:
    return int(torch.randint(0, 2**62, (), device="cpu"))  # whose generator is put back


def common_weight(steps: Sequence[Step], module: nn.Module | None) -> LossWeight:
    """Returns the loss weight of what was made of the last blocks of these steps, one at least.

    Args:
        module: The outermost that has used them.

    Raises:
        BlockError: On all ranks, if any of them weighs losses of these steps differently.
    """
    weight = steps[0].loss_weight
    if all(step.loss_weight.is_alike(weight) for step in steps[1:]):
        return weight
    raise BlockError(
        f"{type(module).__name__} has used the last blocks of {len(steps)} loaders, whose loss weights differ: "
        f"{' and '.join(str(list(step.loss_weight.of_ranks)) for step in steps)} by rank. A gradient that enters at "
        f"its output has one weight. Call the module for one loader after another and add the losses up, each over "
        f"what one call returned. Or weight the losses yourself: FullGraphLoader(..., loss_reduction='weighted') for "
        f"these loaders, and multiply the mean over this rank's seeds by the number of ranks times this rank's share "
        f"of all seeds."
    )
