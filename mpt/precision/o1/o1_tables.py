"""Which function runs in which precision under O1: Apex's lists, as names.

The names are data so that a test can walk them entry by entry. `mpt.precision.o1.o1_rules` resolves them to callables.
A name under `torch` also means the method of `torch.Tensor` if there is one. Functions in no list follow their
input: batch_norm, relu, sigmoid, mean, embedding, pooling, and also `torch.softmax` and `torch.layer_norm`, of which
only the `torch.nn.functional` forms are listed.

The lists of the last part, "extensions", are not Apex's: they let calls run that crash under Apex and run under
`torch.autocast`. In code that Apex could run they change nothing.

Source: NVIDIA/apex, `apex.amp`, as it was before its removal in 2025.
"""

from __future__ import annotations


def _names(text: str) -> list[str]:
    return text.split()


HALF_TORCH = _names(
    """
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc prelu addmm addmv addr matmul
    mm mv addbmm baddbmm bmm
    """
)
HALF_FUNCTIONAL = _names(
    """
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc linear
    """
)
HALF_TENSOR = ["__matmul__"]
HALF_RECURRENT = _names(
    """
    rnn_tanh_cell rnn_relu_cell lstm_cell gru_cell rnn_tanh rnn_relu lstm gru
    """
)
"""Cells and layers: input, hidden state and weights all run in half."""

FLOAT_TORCH = _names(
    """
    acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan pow cumprod cumsum dist norm prod std
    sum var renorm
    """
)
FLOAT_FUNCTIONAL = _names(
    """
    interpolate grid_sample softplus softmin log_softmax softmax gelu layer_norm group_norm local_response_norm
    normalize cosine_similarity poisson_nll_loss cosine_embedding_loss cross_entropy hinge_embedding_loss kl_div
    l1_loss mse_loss margin_ranking_loss multilabel_margin_loss multilabel_soft_margin_loss multi_margin_loss
    nll_loss binary_cross_entropy_with_logits smooth_l1_loss soft_margin_loss triplet_margin_loss ctc_loss
    """
)
FLOAT_TENSOR = ["__ipow__", "__pow__", "__rpow__", "__rtruediv__", "__rdiv__", "cpu"]
"""Python's `1 / h` reaches `__rtruediv__`, which takes the reciprocal, a float32 function; so it is listed here and not
among the promoted operators. `h **= 2` rebinds the name to a float32 tensor, as it does in Apex."""

PROMOTE_TORCH = _names(
    """
    addcdiv addcmul atan2 cross bilinear dot add div mul eq equal ge gt le lt ne
    """
)
PROMOTE_TENSOR = _names(
    """
    __add__ __div__ __eq__ __ge__ __gt__ __le__ __lt__ __mul__ __ne__ __radd__ __rmul__ __rsub__ __sub__
    __truediv__
    """
)
SEQUENCE_TORCH = ["cat", "stack"]

BANNED_FUNCTIONAL = ["binary_cross_entropy"]

NO_HALF_TORCH = _names(
    """
    acos_ asin_ cosh_ exp_ expm1_ log_ log10_ log2_ reciprocal_ rsqrt_ sinh_ tan_
    """
)
NO_HALF_TENSOR = [*NO_HALF_TORCH, "erfinv_", "pow_", "cumprod_", "cumsum_", "renorm_"]
MATCH_SELF_TENSOR = _names(
    """
    addmm_ addmv_ addr_ addbmm_ baddbmm_ addcdiv_ addcmul_ atan2_ add_ div_ mul_ eq_ ge_ gt_ le_ lt_ ne_ sub_
    __iadd__ __isub__ __imul__ __idiv__ __itruediv__
    """
)
"""Apex promotes the augmented operators, but to torch `a += b` and `a.add_(b)` are one callable: both match self."""

COMPOSITES_FUNCTIONAL = _names(
    """
    multi_head_attention_forward gumbel_softmax gaussian_nll_loss lp_pool1d lp_pool2d lp_pool3d huber_loss
    triplet_margin_with_distance_loss linear_cross_entropy
    """
)
"""Written in Python from listed functions: their bodies must be seen by the mode, or those run uncast."""

OPERATOR_METHODS = {
    "__matmul__": "matmul",
    "__add__": "add",
    "__radd__": "add",
    "__sub__": "sub",
    "__mul__": "mul",
    "__rmul__": "mul",
    "__div__": "div",
    "__truediv__": "div",
    "__ne__": "ne",
    "__lt__": "lt",
    "__le__": "le",
    "__gt__": "gt",
    "__ge__": "ge",
    "__iadd__": "add_",
    "__isub__": "sub_",
    "__imul__": "mul_",
    "__idiv__": "div_",
    "__itruediv__": "div_",
}
"""The callables that the mode sees when Python calls an operator's method: several operators share one callable."""

# Extensions.

MIXED_TO_HALF_TORCH = _names("einsum chain_matmul")
MIXED_TO_HALF_FUNCTIONAL = ["scaled_dot_product_attention"]
MIXED_TO_HALF_LINALG = _names("matmul multi_dot vecdot")
"""Products: on one dtype they follow it, as in Apex; on several, which torch refuses, they run in half."""

MIXED_TO_WIDEST_TORCH = _names("vdot inner tensordot scatter_add index_put index_add index_copy")
"""If torch refuses several dtypes, they run in the widest. `spectral_norm` as a parametrisation needs `vdot`."""

HALF_TO_FLOAT_TORCH = _names(
    """
    cdist cholesky cholesky_inverse cholesky_solve det geqrf inverse istft logdet lu lu_solve matrix_exp matrix_power
    orgqr ormqr pca_lowrank pinverse qr slogdet stft svd svd_lowrank triangular_solve
    """
)
HALF_TO_FLOAT_FUNCTIONAL = ["pdist"]
HALF_TO_FLOAT_LINALG = _names(
    """
    cholesky cholesky_ex cond det eig eigh eigvals eigvalsh householder_product inv inv_ex ldl_factor ldl_factor_ex
    ldl_solve lstsq lu lu_factor lu_factor_ex lu_solve matrix_exp matrix_power matrix_rank pinv qr slogdet solve
    solve_ex solve_triangular svd svdvals tensorinv tensorsolve
    """
)
HALF_TO_FLOAT_FFT = _names(
    """
    fft ifft fft2 ifft2 fftn ifftn rfft irfft rfft2 irfft2 rfftn irfftn hfft ihfft hfft2 ihfft2 hfftn ihfftn
    """
)
"""Functions without a kernel for half precision (on CUDA, fft has one for powers of two alone). float64 stays."""
