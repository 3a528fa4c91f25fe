"""The experts of a layer: E MLPs over rows sorted by expert, each projection one grouped GEMM.

R rows, H hidden, or the channels of `moe_latent_size`, E experts, I expert width.
"""

from torch import Tensor, nn

from te_models.kernels.permute import Permutation, permute
from te_models.layers.module.grouped_linear import GroupedLinear

from ...config import ModelConfig
from ..build import Build, LocalExperts, Normal, init_method, output_init_method
from ..mlp import activation_of


class Experts(nn.Module):
    """E experts: this rank's, `num_local_experts` from `first_expert` on.

    partial: each is split over ranks, and results are this rank's part of a sum.
    """

    def __init__(self, config: ModelConfig, build: Build) -> None:
        super().__init__()
        moe = config.moe
        assert moe is not None
        self._activation = activation_of(config.mlp)
        width, ranks = moe.moe_ffn_hidden_size, build.expert_model_parallel_size
        channels = moe.moe_latent_size or config.hidden_size
        experts = self.num_local_experts = moe.num_moe_experts // ranks
        self.first_expert = 0 if build.ep_group is None else build.ep_group.rank() * experts
        self.partial = build.etp_group is not None and build.expert_tensor_parallel_size > 1
        build = build.of_experts

        def start(whole: Normal) -> Normal | LocalExperts:
            return whole if ranks == 1 else LocalExperts(whole, self.first_expert, moe.num_moe_experts)

        grouped = build.expert_layout == "grouped"
        rows = (width,) * (2 if config.mlp.gated else 1)
        self.linear_fc1 = GroupedLinear(
            experts,
            channels,
            sum(rows),
            moe.bias,
            single_grouped_weight=grouped,
            **build.gemm(build.starting(start(init_method(config)), rows), "column"),
        )
        self.linear_fc2 = GroupedLinear(
            experts,
            width,
            channels,
            moe.bias,
            single_grouped_weight=grouped,
            **build.gemm(start(output_init_method(config)), "row"),
        )
        self.linear_fc1.reduce_amax = self.linear_fc2.reduce_amax = ranks == 1

    def forward(
        self, x: Tensor, rows_per_expert: Tensor, permutation: Permutation | None = None, row_align: int = 1
    ) -> Tensor:
        """x: [R, H], rows sorted by expert, or with `permutation` the tokens [T, H] that they come from;
        rows_per_expert: [E], multiples of row_align -> [R, H]."""
        if permutation is not None and self.linear_fc1.tp_size > 1:
            x, permutation = permute(x, permutation), None
        x = x if self.partial else self.linear_fc1.whole_rows(x)
        hidden = self.linear_fc1(x, rows_per_expert, permutation=permutation, row_align=row_align)
        hidden = self._activation.forward(hidden)
        y = self.linear_fc2(hidden, rows_per_expert, row_align=row_align)
        if self.partial:
            return self.linear_fc2.with_bias(y, rows_per_expert, partial=True)
        y = self.linear_fc2.summed(y, None)
        return self.linear_fc2.with_bias(y, rows_per_expert) if self.linear_fc2.tp_size > 1 else y
