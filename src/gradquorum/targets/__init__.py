"""Where rounds live, and the way to one."""

from __future__ import annotations

from gradquorum.errors import InvalidArgumentError
from gradquorum.specs import RoundSpec
from gradquorum.targets.interface import AbstractTarget, Merged, Offer
from gradquorum.targets.local import open_local

__all__ = ["AbstractTarget", "Merged", "Offer", "open_target"]


def open_target(spec: RoundSpec, shared_name: str | None, target: object) -> AbstractTarget:
    """Create a round or attach to the one of that name.

    Raises:
        InvalidArgumentError: there is no such target, or the round of that name has another spec.
    """
    if target is None or target == "local":
        return open_local(spec, shared_name)
    raise InvalidArgumentError(f"target: expected None or 'local', got {target!r}")
