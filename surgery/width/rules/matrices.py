"""Factors and inverses of matrices, in which every row and column counts."""

from surgery.width.axes import fix
from surgery.width.rules.helpers import fresh, results, tensors
from surgery.width.rules.registry import rule
from surgery.width.why import role


@rule(
    """
    linalg_inv_ex linalg_qr linalg_svd _linalg_svd _linalg_eigh linalg_eig linalg_cholesky_ex cholesky _linalg_det
    _linalg_slogdet linalg_lu linalg_lu_factor_ex _linalg_solve_ex linalg_solve_triangular linalg_householder_product
    linalg_matrix_exp linalg_pinv linalg_lstsq cholesky_solve cholesky_inverse geqrf linalg_ldl_factor_ex
    """
)
def _factor(view, args, out):
    why = role("a matrix is factored or inverted as a whole")
    for axis in (axis for tensor in tensors(args) for axis in view.axes_of(tensor)):
        fix(axis, why)
    return [fresh(result.shape, why) for result in results(out)]
