"""For each name in `surgery`'s table of rules how the operation is called: what its tests are made from.

A key names operations that are called alike. A value is a function of such an operation and of hidden features
[2, 5, 8] (two sequences of five tokens); of what it returns, the last axes are read by linear layers.
"""

import torch

MASK = torch.tensor([[True, False, True, True, False]] * 2)


def heads(h):
    return h.unflatten(-1, (2, -1)).transpose(1, 2)


def pixels(h, dims=2):
    """The features as channels, each of five positions along one or more axes."""
    x = h.mT
    for _ in range(dims - 1):
        x = x[..., None].expand(*x.shape, 5)
    return x


def fourfold(h):
    return pixels(h).repeat_interleave(4, 1)


def pooled(h, dims):
    return getattr(torch.ops.aten, f"max_pool{dims}d_with_indices")(pixels(h, dims), [2] * dims)


PATCHES = [2, 2], [1, 1], [0, 0], [1, 1]


def channels_last(y):
    return y.movedim(1, -1)


def square(h):
    """A positive definite matrix of features."""
    return h[0].mT @ h[0] + torch.eye(h.shape[-1], dtype=h.dtype)


def index(*at):
    return torch.tensor(at)


def along_tokens(h, *at):
    return torch.tensor(at)[None, :, None].expand(h.shape[0], len(at), h.shape[-1])


def pool(f, x, *args):
    found = f(x, *args)
    return channels_last(found[0] if isinstance(found, tuple) else found)


def boxes():
    return torch.tensor([[0.0, 0, 0, 4, 4], [1, 1, 2, 3, 4]], dtype=torch.float64)


def norm_of(f, h, *args):
    s = h[0, 0].detach()
    return channels_last(f(h.mT, s, s, s, s * s, *args)[0])


def drawn(f, h, *args):
    """Random numbers, which no comparison may see."""
    return h + 0 * f(h, *args)


def made(f, h, *args, **kwargs):
    """A tensor that the operation makes of sizes alone."""
    return h * f(*args, dtype=h.dtype, **kwargs).fill_(2)


# The features are a width that shrinks.
FREE = {
    # contractions
    "mm": lambda f, h: f(f(h[0], h[0].mT), h[0]),
    "bmm": lambda f, h: f(f(h, h.mT), h),
    "addmm": lambda f, h: f(h[0], h[0] @ h[0].mT, h[0]),
    "baddbmm": lambda f, h: f(h, h @ h.mT, h),
    "linalg_solve_triangular": lambda f, h: f(9 + h @ h.mT, h, upper=True),
    "dot vdot": lambda f, h: h * f(h[0, 0], h[0, 1]),
    "mv": lambda f, h: f(h[0].mT, h[0].sum(-1)),
    "addmv": lambda f, h: f(h[0, 0], h[0].mT, h[0].sum(-1)),
    "addr": lambda f, h: f(h[0], h[0].sum(-1), h[0, 0]),
    "_trilinear": lambda f, h: f(h[0], h[0][:, :, None] * h[1][:, None], h[1], [1, 3], [0], [1, 2], [2, 3]) @ h[0],
    "_cdist_forward": lambda f, h: f(h, h, 2.0, None) @ h,
    "_euclidean_dist": lambda f, h: f(h[0], h[0]) @ h[0],
    "_pdist_forward": lambda f, h: h * f(h[0], 2.0).sum(),
    "_scaled_dot_product_flash_attention_for_cpu": lambda f, h: (
        f(heads(h), heads(h), heads(h), scale=1.0)[0].transpose(1, 2).flatten(2)),
    "convolution": lambda f, h: h * f(h.mT, h.mT[:, :, :3], None, [1], [0], [1], False, [0], 1).sum(),
    "_convolution": lambda f, h: h * f(
        h.mT, h.mT[:, :, :3], None, [1], [0], [1], False, [0], 1, False, False, True, True).sum(),
    "torchvision::deform_conv2d": lambda f, h: h * f(
        pixels(h), pixels(h)[:, :, :1, :1], h.new_zeros(2, 2, 5, 5), h.new_ones(2, 1, 5, 5), h.new_zeros(2),
        1, 1, 0, 0, 1, 1, 1, 1, True).sum(),
    # element by element
    "where": lambda f, h: f(h > 0, h, -h),
    "masked_fill": lambda f, h: f(h, MASK[..., None], 0.3),
    "lerp": lambda f, h: f(h, h[:, :1], 0.3),
    "addcmul addcdiv": lambda f, h: f(h, h[:, :1], 1 + h * h),
    "fill": lambda f, h: h * f(h, 2.0),
    "zero nan_to_num isnan": lambda f, h: h + f(h),
    "_prelu_kernel": lambda f, h: f(h, h[:, :1]),
    "rsub floor_divide": lambda f, h: f(h, 2.0),
    "hardswish hardtanh hardsigmoid leaky_relu elu gelu silu mish softplus celu": lambda f, h: f(h),
    "log_sigmoid_forward": lambda f, h: f(h)[0],
    "clamp": lambda f, h: f(h, -0.1, 0.2),
    "threshold": lambda f, h: f(h, 0.1, 0.2),
    "rrelu_with_noise": lambda f, h: f(h, torch.zeros_like(h)),
    "complex polar": lambda f, h: f(h, h * h).real,
    "copy": lambda f, h: f(h.clone(), h * 2),
    "clone detach alias _to_copy lift_fresh": lambda f, h: f(h),
    "zeros_like ones_like rand_like randn_like": drawn,
    "empty_like": lambda f, h: f(h).copy_(h),
    "bernoulli": lambda f, h: h + 0 * f(h.sigmoid()),
    "full_like": lambda f, h: h * f(h, 2.0),
    "randint_like": lambda f, h: drawn(f, h, 3),
    "_softmax _log_softmax": lambda f, h: f(h, 1, False),
    "_safe_softmax": lambda f, h: f(h, 1),
    "native_dropout": lambda f, h: 0 * f(h, 0.5, True)[0] + h,
    "normal": drawn,
    "uniform cauchy log_normal": lambda f, h: drawn(f, h, 0.1, 1.0),
    "exponential": lambda f, h: drawn(f, h, 1.0),
    "geometric": lambda f, h: drawn(f, h, 0.5),
    "random": drawn,
    "embedding_renorm": lambda f, h: h + f(h[0], index(0, 2), 0.1, 2.0),
    "renorm": lambda f, h: f(h, 2.0, 1, 0.1),
    "glu": lambda f, h: f(torch.cat([h, h], -1), -1),
    # an order along tokens
    "cumsum cumprod logcumsumexp": lambda f, h: f(h, 1),
    "cummax cummin sort": lambda f, h: f(h, 1)[0],
    "flip": lambda f, h: f(h, [1]),
    "roll": lambda f, h: f(h, [2], [1]),
    "rot90": lambda f, h: f(h, 2, [0, 1]),
    "_fft_r2c": lambda f, h: f(h, [1], 0, True).abs(),
    "_fft_c2c": lambda f, h: f(torch.complex(h, h), [1], 0, True).abs(),
    "_fft_c2r": lambda f, h: f(torch.complex(h, h), [1], 0, 8),
    # made of sizes
    "eye": lambda f, h: h @ f(h.shape[-1], dtype=h.dtype),
    "hann_window hamming_window": lambda f, h: h * f(5, dtype=h.dtype)[:, None],
    "arange": lambda f, h: h * f(5, dtype=h.dtype)[:, None],
    "linspace": lambda f, h: h * f(0, 1, 5, dtype=h.dtype)[:, None],
    "full": lambda f, h: h * f(h.shape, 2.0, dtype=h.dtype),
    "zeros ones empty rand randn": lambda f, h: made(f, h, h.shape),
    "scalar_tensor": lambda f, h: h * f(2.0, dtype=h.dtype),
    "empty_strided": lambda f, h: made(f, h, h.shape, h.stride()),
    "empty_permuted": lambda f, h: made(f, h, h.shape, [0, 1, 2]),
    "new_zeros new_ones new_empty": lambda f, h: h * f(h, h.shape).fill_(2),
    "new_full": lambda f, h: h * f(h, h.shape, 2.0),
    "new_empty_strided": lambda f, h: h * f(h, h.shape, h.stride()).fill_(2),
    "randint": lambda f, h: made(f, h, 3, h.shape),
    "randperm": lambda f, h: h * (1 + 0 * f(5, dtype=torch.long)[:, None]),
    "tril_indices triu_indices": lambda f, h: h * f(3, 3).sum(),
    # no numbers
    "_assert_async": lambda f, h: (f(h.sum() < 1e9), h)[1],
    "_functional_assert_async": lambda f, h: (f(h.sum() < 1e9, "", h.sum()), h)[1],
    "_assert_scalar": lambda f, h: (f(True, ""), h)[1],
    "_assert_tensor_metadata": lambda f, h: (f(h), h)[1],
    "_linalg_check_errors": lambda f, h: (f(torch.zeros((), dtype=torch.int32), "", is_matrix=True), h)[1],
    "_local_scalar_dense": lambda f, h: h * f(torch.ones(())),
    "is_same_size equal allclose": lambda f, h: h if f(h, h) else -h,
    # norms, reductions, losses
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional":
        lambda f, h: norm_of(f, h, False, 0.1, 1e-5),
    "_native_batch_norm_legit_no_training _batch_norm_with_update _batch_norm_no_update":
        lambda f, h: norm_of(f, h, 0.1, 1e-5),
    "native_layer_norm": lambda f, h: h + f(h.mT, [5], None, None, 1e-5)[0].mT,
    "native_group_norm": lambda f, h: f(h.mT, h[0, 0], h[0, 0], 2, h.shape[-1], 5, h.shape[-1], 1e-5)[0].mT,
    "_weight_norm_interface": lambda f, h: f(h[0], h[0].sum(1, keepdim=True))[0],
    "sum mean amax amin nansum count_nonzero": lambda f, h: f(h, [1]) + 0 * h[:, 0],
    "prod any all": lambda f, h: f(h, 1) + 0 * h[:, 0],
    "logsumexp": lambda f, h: f(h, [1]),
    "var std var_mean std_mean": lambda f, h: f(h, [1]),
    "max min median kthvalue mode nanmedian": lambda f, h: f(h, *([2] if "kth" in str(f) else []), 1)[0],
    "aminmax": lambda f, h: f(h, dim=1),
    "topk": lambda f, h: f(h, 2, 1)[0],
    "norm linalg_vector_norm": lambda f, h: f(h, 2, [1]),
    "argmax argmin": lambda f, h: h + f(h, 1, True),
    "mse_loss smooth_l1_loss huber_loss soft_margin_loss": lambda f, h: h * f(h, 2 * h, 0),
    "binary_cross_entropy": lambda f, h: f(h.sigmoid(), h.sigmoid(), None, 0),
    "binary_cross_entropy_with_logits": lambda f, h: f(h, h.sigmoid(), None, None, 0),
    "dist": lambda f, h: h * f(h, -h),
    "nll_loss_forward": lambda f, h: h * f(h[0].mT.sum(0)[None], index(2), None, 1, -100)[0],
    "nll_loss2d_forward": lambda f, h: h * f(
        pixels(h).sum(1, keepdim=True), torch.zeros(2, 5, 5, dtype=torch.long), None, 1, -100)[0],
    "multi_margin_loss": lambda f, h: h * f(h.sum(-1), index(1, 2)),
    "multilabel_margin_loss_forward": lambda f, h: h * f(h.sum(-1), torch.zeros(2, 5, dtype=torch.long), 1)[0],
    "_pack_padded_sequence": lambda f, h: f(h, torch.tensor([5, 3]), True)[0],
    # positions picked
    "select": lambda f, h: f(h, 1, 2),
    "unbind": lambda f, h: f(h, 1)[3],
    "unfold": lambda f, h: f(h, 1, 3, 1).sum(-1),
    "diagonal": lambda f, h: f(h[:, :2]).mT,
    "embedding": lambda f, h: f(h[0], index(0, 3)),
    "_embedding_bag _embedding_bag_forward_only": lambda f, h: f(h[0], index(0, 3, 4), index(0, 2))[0],
    "index _unsafe_index": lambda f, h: f(h, [None, index(3, 0)]),
    "index_put _unsafe_index_put": lambda f, h: f(h, [None, index(3, 0)], h[:, :2]),
    "index_select": lambda f, h: f(h, 1, index(3, 0)),
    "index_add index_copy": lambda f, h: f(h, 1, index(3, 0), h[:, :2]),
    "index_fill": lambda f, h: f(h, 1, index(3, 0), 0.5),
    "index_reduce": lambda f, h: f(h, 1, index(3, 0), h[:, :2], "amax"),
    "gather": lambda f, h: f(h, 1, along_tokens(h, 3, 0)),
    "scatter scatter_add": lambda f, h: f(h, 1, along_tokens(h, 3, 0), h[:, :2]),
    "scatter_reduce": lambda f, h: f(h, 1, along_tokens(h, 3, 0), h[:, :2], "amax"),
    "bucketize": lambda f, h: h * f(h, torch.tensor([0.1, 0.5], dtype=h.dtype)),
    "searchsorted": lambda f, h: h * f(torch.tensor([0.1, 0.5], dtype=h.dtype), h),
    "nonzero": lambda f, h: h[:, f(torch.ones(5)).flatten()],
    "nonzero_static": lambda f, h: h[:, f(torch.ones(5), size=3).flatten()],
    "_unique _unique2": lambda f, h: h[:, f(index(1, 3, 1))[0]],
    "unique_dim": lambda f, h: h[:, f(index(1, 3, 1), 0)[0]],
    "unique_consecutive": lambda f, h: h[:, f(index(1, 1, 3))[0]],
    "bincount": lambda f, h: h * f(index(0, 4, 4))[:, None],
    "torchvision::nms": lambda f, h: h[:, f(boxes()[:, 1:], boxes()[:, 1], 0.5)],
    "multinomial": lambda f, h: drawn(lambda h: f(torch.ones(5), 5)[:, None], h),
    "_ctc_loss": lambda f, h: h * f(
        h.sum(-1).mT[..., None].expand(5, 2, 3).log_softmax(-1), index([1, 1], [1, 1]), [5, 5], [2, 2])[0].sum(),
    # shapes
    "view _unsafe_view": lambda f, h: f(h, [10, h.shape[-1]]),
    "_reshape_alias": lambda f, h: f(h, [10, h.shape[-1]], [h.shape[-1], 1]),
    "permute": lambda f, h: f(h, [1, 0, 2]),
    "transpose": lambda f, h: f(h, 0, 1),
    "t": lambda f, h: f(f(h[0])),
    "unsqueeze": lambda f, h: f(h, 1),
    "squeeze": lambda f, h: f(h[:, None]),
    "view_as_real": lambda f, h: f(torch.complex(h, h)).sum(-1),
    "view_as_complex": lambda f, h: f(torch.stack([h, h], -1)).real,
    "expand": lambda f, h: f(h[:1], [3, 5, h.shape[-1]]),
    "repeat": lambda f, h: f(h, [1, 2, 2]),
    "repeat_interleave": lambda f, h: h[:, f(index(1, 2, 0, 1, 0))],
    "slice": lambda f, h: f(h, 1, 1, 4),
    "split unsafe_split": lambda f, h: f(h, 2, 1)[1],
    "split_with_sizes unsafe_split_with_sizes": lambda f, h: f(h, [2, 3], 1)[1],
    "cat": lambda f, h: f([h, h], -1),
    "stack": lambda f, h: f([h, h], 1),
    "slice_scatter": lambda f, h: f(h, h[:, 1:3], 1, 2, 4),
    "select_scatter": lambda f, h: f(h, h[:, 1], 1, 2),
    "diag_embed": lambda f, h: h @ f(h[:, 0]),
    "constant_pad_nd": lambda f, h: f(h, [1, 1, 0, 2], 0.0),
    "reflection_pad1d replication_pad1d": lambda f, h: f(h.mT, [1, 1]).mT,
    "reflection_pad2d replication_pad2d": lambda f, h: channels_last(f(pixels(h), [1, 1, 1, 1])),
    "reflection_pad3d replication_pad3d": lambda f, h: channels_last(f(pixels(h, 3), [1] * 6)),
    "as_strided": lambda f, h: f(h, h.shape, h.stride()),
    # windows
    "max_pool2d_with_indices avg_pool2d": lambda f, h: pool(f, pixels(h), [2, 2]),
    "avg_pool3d max_pool3d_with_indices": lambda f, h: pool(f, pixels(h, 3), [2, 2, 2]),
    "_adaptive_avg_pool2d adaptive_max_pool2d": lambda f, h: pool(f, pixels(h), [2, 2]),
    "_adaptive_avg_pool3d adaptive_max_pool3d": lambda f, h: pool(f, pixels(h, 3), [2, 2, 2]),
    "upsample_linear1d": lambda f, h: pool(f, pixels(h, 1), [8], False),
    "upsample_nearest1d _upsample_nearest_exact1d": lambda f, h: pool(f, pixels(h, 1), [8]),
    "upsample_nearest2d _upsample_nearest_exact2d": lambda f, h: pool(f, pixels(h), [8, 8]),
    "upsample_nearest3d _upsample_nearest_exact3d": lambda f, h: pool(f, pixels(h, 3), [8, 8, 8]),
    "upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_lanczos2d_aa":
        lambda f, h: pool(f, pixels(h), [8, 8], False),
    "upsample_trilinear3d": lambda f, h: pool(f, pixels(h, 3), [8, 8, 8], False),
    "max_unpool2d": lambda f, h: channels_last(f(*pooled(h, 2), [5] * 2)),
    "max_unpool3d": lambda f, h: channels_last(f(*pooled(h, 3), [5] * 3, [2] * 3, [0] * 3)),
    "grid_sampler_2d": lambda f, h: channels_last(f(pixels(h), h.new_zeros(2, 3, 3, 2), 0, 0, False)),
    "affine_grid_generator": lambda f, h: channels_last(
        torch.ops.aten.grid_sampler_2d(pixels(h), f(h.new_ones(2, 2, 3), [*pixels(h).shape], False), 0, 0, False)
    ),
    "grid_sampler_3d": lambda f, h: channels_last(f(pixels(h, 3), h.new_zeros(2, 3, 3, 3, 3), 0, 0, False)),
    "pixel_shuffle": lambda f, h: channels_last(f(fourfold(h), 2)),
    "pixel_unshuffle": lambda f, h: channels_last(f(pixels(h)[..., :4, :4], 2)),
    "channel_shuffle": lambda f, h: channels_last(f(pixels(h), 2)),
    "im2col": lambda f, h: f(pixels(h), *PATCHES).mT,
    "col2im": lambda f, h: channels_last(f(torch.ops.aten.im2col(pixels(h), *PATCHES), [5, 5], *PATCHES)),
    "torchvision::roi_align": lambda f, h: pool(f, pixels(h), boxes(), 1.0, 2, 2, -1, False),
    "torchvision::roi_pool": lambda f, h: pool(f, pixels(h), boxes(), 1.0, 2, 2),
    "torchvision::ps_roi_align": lambda f, h: pool(f, fourfold(h), boxes(), 1.0, 2, 2, -1),
    "torchvision::ps_roi_pool": lambda f, h: pool(f, fourfold(h), boxes(), 1.0, 2, 2),
}  # fmt: skip
# The features stay whole.
WHOLE = {
    "_efficientzerotensor": lambda f, h: h + f(h.shape, dtype=h.dtype, device=h.device),
    "linalg_inv_ex linalg_cholesky_ex linalg_lu_factor_ex linalg_ldl_factor_ex":
        lambda f, h: h @ f(square(h))[0],
    "cholesky": lambda f, h: h @ f(square(h)),
    "linalg_eig": lambda f, h: h + f(square(h))[0].abs().sum(),
    "linalg_qr": lambda f, h: h @ f(square(h))[1].abs(),
    "_linalg_svd": lambda f, h: h * f(square(h))[1],
    "_linalg_eigh": lambda f, h: h * f(square(h))[0],
    "_linalg_det": lambda f, h: h * f(square(h))[0],
    "_linalg_slogdet": lambda f, h: h * f(square(h))[1],
    "linalg_lu": lambda f, h: h @ f(square(h))[1],
    "_linalg_solve_ex": lambda f, h: f(square(h), h[0].mT)[0].mT,
    "linalg_matrix_exp linalg_pinv": lambda f, h: h @ f(0.1 * square(h)),
    "linalg_lstsq": lambda f, h: f(square(h), h[0].mT)[0].mT,
    "cholesky_solve": lambda f, h: f(h[0].mT, square(h)).mT,
    "cholesky_inverse": lambda f, h: h @ f(square(h)),
    "geqrf": lambda f, h: h @ f(square(h))[0],
    "linalg_householder_product": lambda f, h: h @ f(square(h), h[0, 0]),
    "masked_select": lambda f, h: f(h, h < 1e9).reshape(h.shape),
    "masked_scatter": lambda f, h: f(h, h > 0, -h),
    "tril triu": lambda f, h: f(h.mT, 0).mT,
    "take": lambda f, h: h * f(h, index(0, 3)).sum(),
    "put": lambda f, h: f(h, index(0, 3), h[0, 0, :2]),
    "histc": lambda f, h: h + f(h, 4).sum(),
}  # fmt: skip
# Operations that do not run here alone (they are of other devices, or of float32), and one that has the same rule.
KIN = {
    "mkldnn_convolution": "convolution", "cudnn_convolution": "convolution", "convolution_overrideable": "convolution",
    "cudnn_batch_norm": "native_batch_norm", "mkldnn_max_pool2d": "max_pool2d_with_indices",
    "_fused_dropout": "native_dropout", "histogram": "histc", **dict.fromkeys((
        "scaled_dot_product_attention", "_scaled_dot_product_attention_math_for_mps",
        "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_fused_attention_overrideable",
    ), "_scaled_dot_product_flash_attention_for_cpu"),
}  # fmt: skip
# Operations with a test of their own.
APART = {"_grouped_mm", "mkldnn_rnn_layer"}
