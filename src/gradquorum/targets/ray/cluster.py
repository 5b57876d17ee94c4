"""The actors of a round: how they are made, found and named."""

from __future__ import annotations

from typing import Any

from gradquorum.errors import GradQuorumError, UnavailableError
from gradquorum.specs import RoundSpec

__all__ = ["find_coordinator", "make_coordinator", "make_shards", "the_ray"]

_PREFIX = "gradquorum:"
_MAX_CONCURRENCY = 100_000
"""Takes that wait, and processes that are watched, are pending calls."""
_OPTIONS = {
    "lifetime": "detached",
    "get_if_exists": True,
    "max_restarts": -1,
    "max_task_retries": 0,
    "max_concurrency": _MAX_CONCURRENCY,
}
_COUNTED = ("num_cpus", "num_gpus", "memory", "accelerator_type", "scheduling_strategy")
"""What `ray.remote` takes by name; all else is a custom resource."""


def the_ray() -> Any:
    """Return Ray, connected: to the cluster that ``RAY_ADDRESS`` names, or to one that starts here and now.

    Raises:
        GradQuorumError: it is not installed.
        UnavailableError: there is no such cluster.
    """
    try:
        import ray
    except ImportError as error:
        raise GradQuorumError("target='ray': needs Ray: pip install 'gradquorum[ray]'") from error
    if not ray.is_initialized():
        try:
            ray.init()
        except (ConnectionError, RuntimeError) as error:
            raise UnavailableError(f"target='ray': there is no Ray cluster: {error}") from error
    return ray


def _namespace() -> str:
    """Return where the actors of this namespace's rounds are named.

    It goes with the user's, which has no name itself unless the user gave it one: Ray warns of lasting actors there.
    """
    return f"{_PREFIX}{the_ray().get_runtime_context().namespace}"


def find_coordinator(shared_name: str) -> Any:
    """Return the coordinator of that name in this namespace, None if there is none."""
    try:
        return the_ray().get_actor(_PREFIX + shared_name, namespace=_namespace())
    except ValueError:
        return None


def make_coordinator(shared_name: str, spec: RoundSpec, target: Any) -> Any:
    """Return the coordinator of that name, and make it, which makes its shards, if it is not there.

    All are detached, so that they do not die with the process that happened to come first; the coordinator ends
    itself and them when nobody is left.
    """
    from gradquorum.targets.ray.coordinator import Coordinator

    ray = the_ray()
    options = {"name": _PREFIX + shared_name, "namespace": _namespace(), "num_cpus": 0}
    return ray.remote(Coordinator).options(**options, **_OPTIONS).remote(shared_name, spec, target)


def make_shards(shared_name: str, spec: RoundSpec, target: Any) -> tuple[Any, ...]:
    """Return the shards of a round, and make them if they are not there: the coordinator may have been restarted."""
    from gradquorum.targets.ray.shard import Shard

    asked = {"num_cpus": 0, **{name: value for name, value in target.resources.items() if name in _COUNTED}}
    custom = {name: value for name, value in target.resources.items() if name not in _COUNTED}
    ray = the_ray()
    asked.setdefault("scheduling_strategy", "SPREAD")  # so that not all die with one node
    options = {**_OPTIONS, **asked, "namespace": _namespace(), "resources": custom}
    shard_class = ray.remote(Shard)
    return tuple(
        shard_class.options(name=f"{_PREFIX}{shared_name}:shard:{i}", **options).remote(spec, i, target.num_shards)
        for i in range(target.num_shards)
    )
