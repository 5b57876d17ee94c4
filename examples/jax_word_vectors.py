"""Word vectors in JAX: skip-grams with negative samples, four micro-batches for each step of Adam, all in one jit.

python examples/jax_word_vectors.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradquorum.jax as gqj

TOPICS, WORDS_OF_TOPIC, DIM, BATCH, NEGATIVES, MICRO_BATCHES, STEPS = 5, 20, 16, 64, 5, 4, 100
WORDS = TOPICS * WORDS_OF_TOPIC


def sample(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return words [BATCH], and for each a word of its topic followed by words of any, [BATCH, 1 + NEGATIVES]."""
    topics = rng.integers(TOPICS, size=BATCH)
    words, near = topics + TOPICS * rng.integers(WORDS_OF_TOPIC, size=(2, BATCH))
    return words, np.column_stack([near, rng.integers(WORDS, size=(BATCH, NEGATIVES))])


def loss(words: jax.Array, contexts: jax.Array) -> jax.Array:
    """Return the loss of vectors [BATCH, DIM] with those of their contexts [BATCH, 1 + NEGATIVES, DIM]."""
    scores = jnp.einsum("bd,bcd->bc", words, contexts)
    return -(jax.nn.log_sigmoid(scores[:, 0]) + jax.nn.log_sigmoid(-scores[:, 1:]).sum(1)).mean()


def main() -> None:
    rng = np.random.default_rng(1)
    tables = {name: jnp.asarray(rng.normal(0, 0.1, (WORDS, DIM)), jnp.float32) for name in ("words", "contexts")}
    tx = gqj.MultiSteps(optax.adam(0.05), MICRO_BATCHES, size=WORDS)
    state = tx.init(tables)

    @jax.jit
    def step(tables, state, words, contexts):
        # Differentiating what has been looked up, not the tables, gives rows: no gradient is as large as a table.
        got, (of_words, of_contexts) = jax.value_and_grad(loss, (0, 1))(
            tables["words"][words], tables["contexts"][contexts]
        )
        grads = {
            "words": gqj.as_bcoo(words, of_words, WORDS),
            "contexts": gqj.as_bcoo(contexts.ravel(), of_contexts.reshape(-1, DIM), WORDS),
        }
        updates, state = tx.update(grads, state, tables)
        return gqj.apply_updates(tables, updates), state, got

    losses = []
    for _ in range(STEPS * MICRO_BATCHES):
        tables, state, got = step(tables, state, *sample(rng))
        losses.append(float(got))
    vectors = np.array(tables["words"])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    nearest = (vectors @ vectors.T - 2 * np.eye(WORDS)).argmax(1)
    same = (nearest % TOPICS == np.arange(WORDS) % TOPICS).mean()
    print(f"{int(state.gradient_step)} steps; the nearest word is of the same topic for {same:.0%} of the words")


if __name__ == "__main__":
    main()
