"""Blocks whose weights several layers share (Zamba2, arXiv 2411.15242)."""

from dataclasses import dataclass

from .part import ConfigPart, check


@dataclass(frozen=True, kw_only=True)
class SharedBlocksConfig(ConfigPart):
    """Blocks of attention and an MLP, without residual connections. They read a layer's input and the embeddings side
    by side, 2 hidden_size channels; their result, through a projection that is the layer's own, is added to what the
    layer's other mixer reads. Every use has low-rank adapters of the weights. These layers name attention beside the
    other mixer; their attention is the block's."""

    num_blocks: int = 1
    """Number of blocks; the layers use them in turn."""
    layers: tuple[int, ...]
    """Increasing indices of the layers that use a block, from 0."""
    lora_rank: int = 128
    """Rank of the adapters."""
    attention_lora: bool = False
    """Whether the projections of q, k and v have adapters, beside the first projection of the MLP."""

    def _validate(self) -> None:
        check(self.lora_rank > 0, "shared_blocks.lora_rank", self.lora_rank, "a positive integer")
        most = len(self.layers)
        check(0 < self.num_blocks <= most, "shared_blocks.num_blocks", self.num_blocks, f"1 to {most}, one per layer")

    def block_of(self, layer: int) -> int | None:
        """The number of the block that a layer uses; None where it uses none."""
        return self.layers.index(layer) % self.num_blocks if layer in self.layers else None
