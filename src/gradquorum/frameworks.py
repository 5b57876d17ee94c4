"""Arrays of PyTorch and JAX, as NumPy sees them: in place wherever they lie in this machine's own memory.

None of the frameworks is imported here. Whoever has one of their arrays has loaded its framework.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradquorum.errors import InvalidArgumentError, InvalidDTypeError

__all__ = ["check_concrete", "from_torch", "is_torch", "split_sparse"]


def _loaded(module: str, name: str) -> Any:
    """Return a class of a framework for `isinstance`; what nothing is an instance of if it is not loaded (yet)."""
    return getattr(sys.modules.get(module), name, ())


def is_torch(value: Any) -> bool:
    """Tell whether this is a tensor of PyTorch."""
    return isinstance(value, _loaded("torch", "Tensor"))


def from_torch(what: str, tensor: Any) -> tuple[NDArray[Any], bool]:
    """Return a torch tensor as an array, and whether that is the tensor's own memory.

    A tensor of another device is copied, once. So is a conjugate or a negative view, of which only a bit tells.

    Raises:
        InvalidArgumentError: it is not dense, or has no numbers (meta, traced and distributed tensors, and those whose
            memory was freed).
        InvalidDTypeError: NumPy has no such dtype.
    """
    torch = sys.modules["torch"]
    try:
        if tensor.layout is not torch.strided:
            raise InvalidArgumentError(
                f"{what}: expected a dense tensor, got one of layout {_word(tensor.layout)}; "
                "give a sparse gradient to apply_indexed_slices_grad"
            )
        here = tensor.is_cpu
        if not here:
            tensor = tensor.detach().cpu()
        if tensor.dtype is torch.bfloat16:  # NumPy has no name for it: its bits cross
            import ml_dtypes

            bits: NDArray[Any] = tensor.detach().resolve_neg().view(torch.int16).numpy()
            array = bits.view(ml_dtypes.bfloat16)
        else:
            array = tensor.numpy(force=True)  # detaches, and resolves views
        if array.size and not tensor.data_ptr():  # NumPy has made memory up
            raise RuntimeError("its memory was freed, or never made")
        return array, here
    except InvalidArgumentError:
        raise
    except TypeError as error:
        raise InvalidDTypeError(f"{what}: expected a dtype that NumPy has, got {tensor.dtype}: {error}") from error
    except (RuntimeError, ValueError) as error:  # of PyTorch, or of the operations of a class of somebody else's
        raise InvalidArgumentError(
            f"{what}: expected a tensor with numbers in memory, got {type(tensor).__name__}: {error}"
        ) from error


def check_concrete(what: str, value: Any) -> None:
    """Refuse what stands for an array while JAX traces a function.

    Raises:
        InvalidArgumentError: it is a tracer.
    """
    if isinstance(value, _loaded("jax.core", "Tracer")):
        raise InvalidArgumentError(
            f"{what}: expected an array, got a tracer, which has no numbers yet; in functions that jax.jit traces, "
            "call gradquorum.jax.apply_grad"
        )


def split_sparse(what: str, gradient: Any) -> tuple[Any, Any, Any] | None:
    """Return `(indices, values, shape)` of a sparse tensor of a framework; None for everything else.

    Raises:
        InvalidArgumentError: it is of another layout than lists of rows.
    """
    if is_torch(gradient):
        return _split_torch(what, gradient)
    if isinstance(gradient, _loaded("jax.experimental.sparse", "BCOO")):
        return _split_bcoo(what, gradient)
    return None


def _split_torch(what: str, tensor: Any) -> tuple[Any, Any, Any]:
    torch = sys.modules["torch"]
    if tensor.layout is not torch.sparse_coo:
        advice = "write grad.to_sparse(1) to pick its rows that are not zero"
        if tensor.layout is not torch.strided:
            advice = "write grad.to_dense().to_sparse(1) to make one"
        raise InvalidArgumentError(
            f"{what}: expected a tensor of layout sparse_coo, got {_word(tensor.layout)}; {advice}"
        )
    if tensor.sparse_dim() != 1:
        raise InvalidArgumentError(
            f"{what}: expected a sparse tensor with one sparse dimension, the rows, got {tensor.sparse_dim()}; "
            "write grad.to_dense().to_sparse(1) to make one"
        )
    if tensor.requires_grad:
        tensor = tensor.detach()
    indices, _ = from_torch(f"{what}.indices", tensor._indices())
    return indices[0], tensor._values(), tuple(tensor.shape)


def _split_bcoo(what: str, matrix: Any) -> tuple[Any, Any, Any]:
    if matrix.n_sparse != 1 or matrix.n_batch != 0:
        raise InvalidArgumentError(
            f"{what}: expected a BCOO with one sparse dimension, the rows, and no batch dimensions, got "
            f"n_sparse={matrix.n_sparse}, n_batch={matrix.n_batch}; make it with n_dense={len(matrix.shape) - 1}"
        )
    check_concrete(what, matrix.data)
    check_concrete(what, matrix.indices)
    try:
        indices, values = np.asarray(matrix.indices)[:, 0], matrix.data
        padding = indices == matrix.shape[0]  # JAX fills a BCOO up with rows right behind the last one
        if padding.any():
            kept = ~padding
            indices, values = indices[kept], np.asarray(values)[kept]
    except RuntimeError as error:  # deleted, or donated to a function
        raise InvalidArgumentError(f"{what}: expected a matrix with numbers in memory, got BCOO: {error}") from error
    return indices, values, tuple(matrix.shape)


def _word(layout: Any) -> str:
    return str(layout).removeprefix("torch.")
