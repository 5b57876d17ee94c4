"""Where rounds live, and the way to one."""

from __future__ import annotations

import os
import sys
from typing import Any

from gradquorum.errors import GradQuorumError, InvalidArgumentError
from gradquorum.specs import RoundSpec
from gradquorum.targets.interface import PRIVATE, AbstractTarget, Merged, Terms
from gradquorum.targets.local import attach_local, open_local

__all__ = ["AbstractTarget", "Merged", "Terms", "attach_target", "default_target"]
__all__ += ["open_shared", "open_target", "set_default"]

_default: str | None = None
"""What `target=None` means: a server's address, or None for this process."""


def set_default(address: str | None) -> None:
    """Let `target=None` mean a server, or with None this process."""
    global _default
    _default = address


def default_target() -> str | None:
    """Return what `target=None` means: a server's address, or None for this process."""
    return _default


def open_target(spec: RoundSpec, shared_name: str | None, target: object) -> AbstractTarget:
    """Create a round or attach to the one of that name.

    Args:
        spec: what the round is to do.
        shared_name: the name it has for others; None for a round of one's own.
        target: None for the default; ``"local"``; the address or the object of a server; or an open target,
            which is returned.

    Raises:
        InvalidArgumentError: there is no such target, or the round of that name has another spec.
        UnavailableError: there is no server at that address.
    """
    if isinstance(target, AbstractTarget):
        return target
    if target is None:
        target = _default
    if target is None or target == "local":
        return open_local(spec, shared_name)
    opened: AbstractTarget = open_shared(target, shared_name, spec)
    return opened


def attach_target(shared_name: str, target: object) -> tuple[AbstractTarget, RoundSpec]:
    """Attach to the round of that name, and return its spec.

    Raises:
        InvalidArgumentError: there is none, or no such target.
    """
    if target is None:
        target = _default
    if target is None or target == "local":
        return attach_local(shared_name)
    opened = open_shared(target, shared_name, None)
    return opened, opened.spec


def open_shared(target: object, shared_name: str | None, spec: RoundSpec | None, *, create: bool = True) -> Any:
    """Create a round in a server, or attach to the one of that name; without a spec, to whatever it is.

    With ``create=False`` it only attaches, and raises `ClosedError` if the round is not there.
    """
    if shared_name is None:
        shared_name = f"{PRIVATE}{os.urandom(16).hex()}"
    if isinstance(target, os.PathLike):
        target = os.fspath(target)
    if isinstance(target, str) and os.sep in target:
        if sys.platform != "linux":
            raise GradQuorumError(f"target={target!r}: several processes need Linux, and this is {sys.platform}")
        from gradquorum.targets.process.target import open_remote

        return open_remote(target, shared_name, spec, create)
    server = sys.modules.get("gradquorum.server")
    if server is not None and isinstance(target, server.Server):
        return target._open(spec, shared_name)
    is_name = isinstance(target, str) and target
    hint = f" (for a socket in this folder write {os.path.join(os.curdir, str(target))!r})" if is_name else ""
    raise InvalidArgumentError(
        f"target: expected None, 'local' or the address of a server, a path with a {os.sep!r} in it{hint}; "
        f"got {target!r}"
    )
