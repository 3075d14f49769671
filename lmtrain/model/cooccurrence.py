"""Initial word embeddings from the co-occurrences of words in a text, by PPMI and a truncated SVD.

Shapes: V word types, C context types, E features, N tokens.
"""

import numpy as np
import torch
from torch import Tensor

WINDOW = 4
"""How many tokens before and after a word are its contexts; one at distance d counts 1 / d."""
CONTEXT_TYPES = 8_000
"""Only the first word types are contexts: where ids are sorted by frequency, the frequent ones."""
SMOOTHING = 0.75
"""The power of the contexts' frequencies: without it, rare contexts have the largest ratios (Levy et al., 2015)."""
TOKENS = 2**21
"""How much of a text is read: about ten seconds on one core."""


def cooccurrence_embedding(ids: np.ndarray, vocab_size: int, width: int) -> Tensor:
    """Return a vector for each word type, (V, E) float32, from the first `TOKENS` of a text, ids (N,).

    The matrix of words and contexts holds their positive pointwise mutual information; a context before a word and the
    same one after it are two columns. A truncated singular value decomposition factors it, and words get the left
    vectors times the root of the singular values (Levy & Goldberg, 2014). Beyond E + 16 word types it is a randomized
    one (Halko et al., 2011), so the factors are approximate. A random rotation makes all features alike. Each vector
    has unit mean square. Words without a context get a random vector, from torch's default generator.
    """
    vectors = torch.zeros(vocab_size, width)
    word, context, count = _contexts(ids[:TOKENS], vocab_size)
    information = _pointwise_information(word, context, count, vocab_size)
    rank = min(width, *information.shape)
    left, singular = left_singular_vectors(information, min(rank + 16, *information.shape))
    vectors[:, :rank] = left[:, :rank] * singular[:rank].sqrt()
    rotation, _ = torch.linalg.qr(torch.randn(width, width))
    vectors = vectors @ rotation
    norms = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    known = norms > 1e-6 * norms.max()
    return torch.where(known, vectors / norms * width**0.5, torch.randn(vocab_size, width))


def _contexts(ids: np.ndarray, vocab_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the pairs of a word and a context that occur, and their counts, as three arrays.

    Context c is column c before the word, and column C + c after it.
    """
    types = min(CONTEXT_TYPES, vocab_size)
    pairs, counts = [], []
    for distance in range(1, WINDOW + 1):
        before, after = ids[:-distance].astype(np.int64), ids[distance:].astype(np.int64)
        for word, context, side in ((after, before, 0), (before, after, types)):
            frequent = context < types
            distinct, times = np.unique(word[frequent] * (2 * types) + context[frequent] + side, return_counts=True)
            pairs.append(distinct)
            counts.append(times / distance)
    pair, place = np.unique(np.concatenate(pairs), return_inverse=True)
    return pair // (2 * types), pair % (2 * types), np.bincount(place, np.concatenate(counts))


def _pointwise_information(word: np.ndarray, context: np.ndarray, count: np.ndarray, vocab_size: int) -> Tensor:
    """max(0, log(p(w, c) / (p(w) p(c)))) as a sparse matrix (V, 2 C), with p(c) from counts to the power SMOOTHING."""
    columns = 2 * min(CONTEXT_TYPES, vocab_size)
    of_word = np.bincount(word, count, vocab_size)
    of_context = np.bincount(context, count, columns) ** SMOOTHING
    information = np.log(count * of_context.sum() / (of_word[word] * of_context[context]))
    positive = information > 0
    places = torch.from_numpy(np.stack((word[positive], context[positive])))
    values = torch.from_numpy(information[positive].astype(np.float32))
    size = (vocab_size, columns)
    # PyTorch 2.11 warns where only the argument `check_invariants` says so.
    with torch.sparse.check_sparse_tensor_invariants(True):  # type: ignore[no-untyped-call]
        return torch.sparse_coo_tensor(places, values, size, is_coalesced=True)


def left_singular_vectors(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return approximations of R left singular vectors (V, R) of a sparse matrix (V, C), and of the largest R singular
    values.

    This is `torch.svd_lowrank` (Halko et al., 2011, algorithm 5.1), with the same random numbers and bits, but the
    products are of matrices stored row by row: a sparse matrix times one stored column by column, as torch's QR
    decomposition returns it, takes several times as long.
    """
    is_tall = matrix.shape[0] >= matrix.shape[1]
    tall = matrix if is_tall else matrix.t()
    basis = _orthonormal(tall @ torch.randn(tall.shape[1], rank))
    for _ in range(2):
        basis = _orthonormal(tall @ _orthonormal(tall.t() @ basis))
    left, singular, right = torch.linalg.svd((tall.t() @ basis).t(), full_matrices=False)
    return basis @ left if is_tall else right.t(), singular


def _orthonormal(x: Tensor) -> Tensor:
    """A basis of the columns' space (N, R), stored row by row."""
    return torch.linalg.qr(x).Q.contiguous()
