"""The operators on tensors: routed LoRA deltas, folded into a base output in place.

Nothing here knows adapters, names or models. CPU tensors are computed by `reference`, CUDA tensors
by Triton kernels; both give the contract's bits.
"""

from lorafold.expert_route import ExpertTables, MoeExpertRoute, pack_expert_tables
from lorafold.ops.ahead import CallShape, warm_up
from lorafold.ops.beside import apply_lora_beside
from lorafold.ops.dense import apply_lora_bgmv, apply_lora_delta
from lorafold.ops.experts import (
    MLG_M_TILE,
    gather_bgmv_grids,
    gather_row_token,
    grouped_down_wc,
    grouped_down_windows,
    moe_lora_gather_bgmv,
    moe_lora_grouped_down,
    plan_gather,
    plan_grouped,
)
from lorafold.ops.plan import Plan, make_plan
from lorafold.ops.scratch import scratch_bytes
from lorafold.route import LoraAttnWeights, LoraFfnWeights, LoraPair, LoraRoute

__all__ = [
    "MLG_M_TILE",
    "CallShape",
    "ExpertTables",
    "LoraAttnWeights",
    "LoraFfnWeights",
    "LoraPair",
    "LoraRoute",
    "MoeExpertRoute",
    "Plan",
    "apply_lora_beside",
    "apply_lora_bgmv",
    "apply_lora_delta",
    "gather_bgmv_grids",
    "gather_row_token",
    "grouped_down_wc",
    "grouped_down_windows",
    "make_plan",
    "moe_lora_gather_bgmv",
    "moe_lora_grouped_down",
    "pack_expert_tables",
    "plan_gather",
    "plan_grouped",
    "scratch_bytes",
    "warm_up",
]
