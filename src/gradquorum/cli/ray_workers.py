"""Workers that are tasks of a Ray cluster on this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from typing import Any

__all__ = ["RayExecutor", "local_ray"]


class RayExecutor(Executor):
    """Runs each call as a task."""

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        """Start a task and return a future of its result."""
        import ray

        future: Future[Any] = ray.remote(call_it).options(num_cpus=0).remote(call, arguments, options).future()
        return future


def call_it(call: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Make a call in a task."""
    return call(*arguments, **options)


@contextlib.contextmanager
def local_ray() -> Iterator[None]:
    """Have a Ray cluster on this machine, and end it.

    Raises:
        ImportError: Ray is not installed.
    """
    import ray

    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()
