"""The schemas of torch_npu 2.13.0 for the operators that have a reference kernel here.

In: nothing. Out: `SCHEMAS`. Defined by `install()` where torch_npu isn't there; where it is, a test compares them.
"""

_TEXT = """
npu_moe_gating_top_k_softmax(Tensor x, Tensor? finished=None, int k=1) -> (Tensor, Tensor, Tensor)

npu_moe_gating_top_k(Tensor x, int k, *, Tensor? bias=None, Tensor? input_ids=None, Tensor? tid2eid=None,
    int k_group=1, int group_count=1, int group_select_mode=0, int renorm=0, int norm_type=0, bool out_flag=False,
    float routed_scaling_factor=1., float eps=1e-20) -> (Tensor, Tensor, Tensor)

npu_moe_init_routing(Tensor x, Tensor row_idx, Tensor expert_idx, int active_num) -> (Tensor, Tensor, Tensor)

npu_moe_init_routing_v2(Tensor x, Tensor expert_idx, *, Tensor? scale=None, Tensor? offset=None, int active_num=-1,
    int expert_capacity=-1, int expert_num=-1, int drop_pad_mode=0, int expert_tokens_num_type=0,
    bool expert_tokens_num_flag=False, int quant_mode=-1, int[2] active_expert_range=[], int row_idx_type=0,
    int? x_dtype=None) -> (Tensor, Tensor, Tensor, Tensor)

npu_moe_init_routing_quant(Tensor x, Tensor expert_idx, *, Tensor? scale=None, Tensor? offset=None,
    int active_num=1024, int expert_capacity=0, int expert_num=256, int drop_pad_mode=0,
    int expert_tokens_num_mode=0, bool expert_tokens_before_capacity_flag=False, int quant_mode=1)
    -> (Tensor, Tensor, Tensor, Tensor, Tensor)

npu_moe_compute_expert_tokens(Tensor sorted_expert_for_source_row, int num_expert) -> Tensor

npu_moe_token_permute(Tensor tokens, Tensor indices, int? num_out_tokens=None, bool padded_mode=False)
    -> (Tensor, Tensor)

npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? scale=None, Tensor[]? offset=None,
    Tensor[]? antiquant_scale=None, Tensor[]? antiquant_offset=None, Tensor[]? per_token_scale=None,
    Tensor? group_list=None, Tensor[]? activation_input=None, Tensor[]? activation_quant_scale=None,
    Tensor[]? activation_quant_offset=None, int? split_item=0, int? group_type=None, int? group_list_type=0,
    int? act_type=0, int[]? tuning_config=None, int? output_dtype=None, int? x_dtype=None, int? weight_dtype=None,
    int? scale_dtype=None, int? per_token_scale_dtype=None) -> Tensor[]

npu_grouped_matmul.List(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? scale=None,
    Tensor[]? offset=None, Tensor[]? antiquant_scale=None, Tensor[]? antiquant_offset=None,
    Tensor[]? per_token_scale=None, int[]? group_list=None, Tensor[]? activation_input=None,
    Tensor[]? activation_quant_scale=None, Tensor[]? activation_quant_offset=None, int? split_item=0,
    int? group_type=None, int? group_list_type=0, int? act_type=0, ScalarType? output_dtype=None) -> Tensor[]

npu_swiglu(Tensor input, int dim=-1) -> Tensor

npu_clipped_swiglu(Tensor x, *, Tensor? group_index=None, int dim=-1, float alpha=1.702, float limit=7.,
    float bias=1., bool interleaved=True) -> Tensor

npu_dynamic_quant(Tensor input, *, Tensor? smooth_scales=None, Tensor? group_index=None, int? dst_type=None,
    str quant_mode="pertoken", float dst_type_max=0.) -> (Tensor, Tensor)

npu_dynamic_mx_quant(Tensor input, *, int axis=-1, str round_mode="rint", int dst_type=296, int block_size=32,
    int? scale_alg=0, float dst_type_max=0., float max_low_bound=0.) -> (Tensor, Tensor)

npu_dequant_swiglu_quant(Tensor x, *, Tensor? weight_scale=None, Tensor? activation_scale=None, Tensor? bias=None,
    Tensor? quant_scale=None, Tensor? quant_offset=None, Tensor? group_index=None, bool activate_left=False,
    int quant_mode=0, int? dst_type=None, int? round_mode=None, int? activate_dim=None, int swiglu_mode=0,
    float clamp_limit=7., float glu_alpha=1.702, float glu_bias=1.) -> (Tensor, Tensor)

npu_swiglu_quant(Tensor x, *, Tensor? smooth_scales=None, Tensor? offsets=None, Tensor? group_index=None,
    bool activate_left=False, int quant_mode=0, int group_list_type=0, ScalarType? dst_type=None)
    -> (Tensor, Tensor)

npu_grouped_matmul_swiglu_quant_v2(Tensor x, Tensor[] weight, Tensor[] weight_scale, Tensor x_scale,
    Tensor group_list, *, Tensor? smooth_scale=None, Tensor[]? weight_assist_matrix=None, Tensor? bias=None,
    int? dequant_mode=0, int? dequant_dtype=6, int? quant_mode=0, int? quant_dtype=1, int? group_list_type=0,
    int[]? tuning_config=None, int? x_dtype=None, int? weight_dtype=None, int? weight_scale_dtype=None,
    int? x_scale_dtype=None) -> (Tensor, Tensor)

npu_grouped_matmul_swiglu_quant(Tensor x, Tensor weight, Tensor group_list, Tensor weight_scale, Tensor x_scale, *,
    Tensor? bias=None, Tensor? offset=None) -> (Tensor, Tensor, Tensor)

npu_grouped_matmul_finalize_routing(Tensor x, Tensor w, Tensor group_list, *, Tensor? scale=None,
    Tensor? bias=None, Tensor? offset=None, Tensor? pertoken_scale=None, Tensor? shared_input=None,
    Tensor? logit=None, Tensor? row_index=None, ScalarType? dtype=None, float? shared_input_weight=1.,
    int? shared_input_offset=0, int? output_bs=0, int? group_list_type=1, int[]? tuning_config=None,
    int? x_dtype=None, int? w_dtype=None, int? scale_dtype=None, int? pertoken_scale_dtype=None) -> Tensor

npu_moe_re_routing(Tensor tokens, Tensor expert_token_num_per_rank, *, Tensor? per_token_scales=None,
    int expert_token_num_type=1, int idx_type=0, int? tokens_dtype=None) -> (Tensor, Tensor, Tensor, Tensor)

npu_moe_distribute_dispatch(Tensor x, Tensor expert_ids, str group_ep, int ep_world_size, int ep_rank_id,
    int moe_expert_num, *, Tensor? scales=None, Tensor? x_active_mask=None, Tensor? expert_scales=None,
    str group_tp="", int tp_world_size=0, int tp_rank_id=0, int expert_shard_type=0, int shared_expert_num=1,
    int shared_expert_rank_num=0, int quant_mode=0, int global_bs=0, int expert_token_nums_type=1)
    -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)

npu_moe_distribute_dispatch_v2(Tensor x, Tensor expert_ids, str group_ep, int ep_world_size, int ep_rank_id,
    int moe_expert_num, *, Tensor? scales=None, Tensor? x_active_mask=None, Tensor? expert_scales=None,
    Tensor? elastic_info=None, Tensor? performance_info=None, str group_tp="", int tp_world_size=0,
    int tp_rank_id=0, int expert_shard_type=0, int shared_expert_num=1, int shared_expert_rank_num=0,
    int quant_mode=0, int global_bs=0, int expert_token_nums_type=1, str comm_alg="", int zero_expert_num=0,
    int copy_expert_num=0, int const_expert_num=0, int? y_dtype=None, int? x_dtype=None, int? scales_dtype=None)
    -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)

npu_moe_distribute_combine(Tensor expand_x, Tensor expert_ids, Tensor expand_idx, Tensor ep_send_counts,
    Tensor expert_scales, str group_ep, int ep_world_size, int ep_rank_id, int moe_expert_num, *,
    Tensor? tp_send_counts=None, Tensor? x_active_mask=None, Tensor? activation_scale=None,
    Tensor? weight_scale=None, Tensor? group_list=None, Tensor? expand_scales=None, Tensor? shared_expert_x=None,
    str group_tp="", int tp_world_size=0, int tp_rank_id=0, int expert_shard_type=0, int shared_expert_num=1,
    int shared_expert_rank_num=0, int global_bs=0, int out_dtype=0, int comm_quant_mode=0, int group_list_type=0)
    -> Tensor

npu_moe_distribute_combine_add_rms_norm(Tensor expand_x, Tensor expert_ids, Tensor expand_idx,
    Tensor ep_send_counts, Tensor expert_scales, Tensor residual_x, Tensor gamma, str group_ep, int ep_world_size,
    int ep_rank_id, int moe_expert_num, *, Tensor? tp_send_counts=None, Tensor? x_active_mask=None,
    Tensor? activation_scale=None, Tensor? weight_scale=None, Tensor? group_list=None, Tensor? expand_scales=None,
    Tensor? shared_expert_x=None, Tensor? elastic_info=None, Tensor? ori_x=None, Tensor? const_expert_alpha_1=None,
    Tensor? const_expert_alpha_2=None, Tensor? const_expert_v=None, str group_tp="", int tp_world_size=0,
    int tp_rank_id=0, int expert_shard_type=0, int shared_expert_num=1, int shared_expert_rank_num=0,
    int global_bs=0, int out_dtype=0, int comm_quant_mode=0, int group_list_type=0, str comm_alg="",
    float norm_eps=1e-06, int zero_expert_num=0, int copy_expert_num=0, int const_expert_num=0)
    -> (Tensor, Tensor, Tensor)

npu_add_rms_norm(Tensor x1, Tensor x2, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor, Tensor)

npu_moe_distribute_combine_v2(Tensor expand_x, Tensor expert_ids, Tensor assist_info_for_combine,
    Tensor ep_send_counts, Tensor expert_scales, str group_ep, int ep_world_size, int ep_rank_id,
    int moe_expert_num, *, Tensor? tp_send_counts=None, Tensor? x_active_mask=None, Tensor? expand_scales=None,
    Tensor? shared_expert_x=None, Tensor? elastic_info=None, Tensor? ori_x=None, Tensor? const_expert_alpha_1=None,
    Tensor? const_expert_alpha_2=None, Tensor? const_expert_v=None, Tensor? performance_info=None,
    str group_tp="", int tp_world_size=0, int tp_rank_id=0, int expert_shard_type=0, int shared_expert_num=1,
    int shared_expert_rank_num=0, int global_bs=0, int comm_quant_mode=0, str comm_alg="", int zero_expert_num=0,
    int copy_expert_num=0, int const_expert_num=0) -> Tensor

npu_moe_finalize_routing(Tensor expanded_permuted_rows, Tensor? skip1, Tensor? skip2, Tensor? bias, Tensor? scales,
    Tensor expanded_src_to_dst_row, Tensor? export_for_source_row, int? drop_pad_mode=0, int? k=1) -> Tensor

npu_moe_token_unpermute(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None, bool padded_mode=False,
    int[]? restore_shape=None) -> Tensor
"""

SCHEMAS = tuple(" ".join(schema.split()) for schema in _TEXT.strip().split("\n\n"))
