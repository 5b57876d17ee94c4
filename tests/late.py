"""Late gradients, for the tests of staleness policies."""

from gradquorum import Defer, Weighted, Window
from tests.support import apply, only_local

POLICIES = ["strict", Window(2), Weighted("inverse"), Weighted("exponential", decay=0.25, max_lag=3), Defer()]

only_where_functions_are = only_local("no code travels: a function of the user's stays in its process")


def at_step(acc, step):
    acc.set_global_step(step)
    return acc


def late(acc, indices, values, lag, **options):
    return apply(acc, indices, values, local_step=acc.global_step - lag, **options)
