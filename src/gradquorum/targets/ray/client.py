"""The session of this process with one coordinator."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NoReturn

from gradquorum.errors import ClosedError, GradQuorumError, ResourceExhaustedError, UnavailableError
from gradquorum.membership import Worker
from gradquorum.specs import RoundSpec
from gradquorum.targets.ray.cluster import find_coordinator, make_coordinator, the_ray
from gradquorum.targets.ray.losses import Losses
from gradquorum.targets.ray.records import Failure, Opened, Resumed, Void

__all__ = ["Client", "client_for", "drop"]

_BACK_SECONDS = 60.0
"""How long calls wait for a coordinator or shard that is being restarted."""
_RETRY_SECONDS = 0.1

_clients: dict[str, Client] = {}
"""By shared name. Guarded by _clients_lock."""
_clients_lock = threading.RLock()
_dropped: SimpleQueue[tuple[Client, int]] = SimpleQueue()
_releasing: list[threading.Thread] = []
"""The thread that closes dropped handles, once there is one. Guarded by _clients_lock."""


def client_for(shared_name: str, spec: RoundSpec | None, target: Any, create: bool) -> tuple[Client, int, Opened]:
    """Return this process's session with the coordinator of that name, with a new handle.

    Raises:
        InvalidArgumentError: it has another spec.
        LookupError: there is none, and none may be made.
    """
    deadline = time.monotonic() + _BACK_SECONDS
    while True:
        with _clients_lock:
            client = _clients.get(shared_name)
            if client is None or not client.usable:
                actor = find_coordinator(shared_name)
                if actor is None:
                    if not create or spec is None:
                        raise LookupError(shared_name)
                    actor = make_coordinator(shared_name, spec, target)
                client = _clients[shared_name] = Client(shared_name, actor)
            if not _releasing:
                _releasing.append(threading.Thread(target=_release, name="gradquorum-release", daemon=True))
                _releasing[0].start()
        try:
            return client, *client.open(spec)
        except _GoneError:
            with _clients_lock:
                if _clients.get(shared_name) is client:
                    del _clients[shared_name]
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_SECONDS)


def drop(client: Client, number: int) -> None:
    """Close a handle that nobody can use any more. A finalizer calls this, whose thread may hold any lock of Ray's."""
    _dropped.put((client, number))


def _release() -> None:
    """Close the handles that are dropped."""
    from ray.exceptions import RayError

    while True:
        client, number = _dropped.get()
        if client.usable:
            # Ray ends calls by SystemExit when it is shut down meanwhile; it may be started again.
            with contextlib.suppress(RayError, UnavailableError, ClosedError, SystemExit):
                client.close(number, for_all=False)
        del client


class _GoneError(UnavailableError):
    """The coordinator is about to go, or has gone."""


class Client:
    """One process and one coordinator. Any thread may call.

    Guarded by ``_lock``: the fields that `_resume` changes. They may be read without it.
    """

    def __init__(self, shared_name: str, coordinator: Any) -> None:
        self.shared_name = shared_name
        self.coordinator = coordinator
        self.token = secrets.token_bytes(16)
        self.losses = Losses()
        self._pid = os.getpid()
        self._ray = the_ray()
        self._session = self._ray.get_runtime_context().get_job_id()
        self._stay = self._new_stay()
        self._lock = threading.RLock()
        self.incarnation = 0
        self.reason = ""
        self.is_durable = False
        """Whether nothing was lost the last time that an incarnation ended."""
        self.shards: tuple[Any, ...] = ()
        self.bounds: tuple[int, ...] | None = None
        self._over = False
        self._numbers = itertools.count()
        self._open: set[int] = set()
        self._joined: set[Worker] = set()

    @property
    def usable(self) -> bool:
        """Whether there may be a round behind it."""
        return (
            not self._over
            and self._pid == os.getpid()
            and self._ray.is_initialized()
            and self._ray.get_runtime_context().get_job_id() == self._session
        )

    @property
    def over(self) -> bool:
        """Whether the round is known to have been closed."""
        return self._over

    def new_number(self) -> int:
        """Return a number that this session has not used."""
        return next(self._numbers)

    # Calls

    def get(self, call: Any, timeout: float | None = None) -> Any:
        """Wait for a call to an actor and return its answer.

        Raises:
            GradQuorumError: what it answered.
            RayError: there is none.
        """
        answer = self._ray.get(call, timeout=timeout)
        if type(answer) is Failure:
            raise answer.error
        return answer

    def check(self) -> None:
        """Raise if there is no round any more."""
        if self._pid != os.getpid():
            raise ClosedError("this handle belongs to the parent of this forked process; make a new one here")
        if self._over:
            raise ClosedError("the round has been closed; make a new accumulator or group to go on")
        if not self._ray.is_initialized():
            raise UnavailableError("this process is not connected to Ray any more; make a new handle once it is")

    def ask(self, number: int, what: str, *arguments: Any) -> Any:
        """Make a call about a handle, again if a round was void meanwhile, and return the answer."""
        return self.insist(lambda seen: self.coordinator.ask.remote(self.token, seen, number, what, *arguments))

    def insist(self, call: Callable[[int], Any], on_void: Callable[[], None] | None = None) -> Any:
        """Make a call with the incarnation as argument until it is answered in that one.

        `on_void` is called after each time that a round was void.
        """
        from ray.exceptions import RayError

        while True:
            self.check()
            seen = self.incarnation
            try:
                answer = self.get(call(seen))
            except RayError as error:
                self.resume(seen, error)
            else:
                if type(answer) is not Void:
                    return answer
                self.resume(seen)
            if on_void is not None:
                on_void()

    def open(self, spec: RoundSpec | None) -> tuple[int, Opened]:
        """Return the number of a new handle."""
        from ray.exceptions import RayActorError

        number = self.new_number()
        try:
            opened: Opened = self.get(self.coordinator.open.remote(self.token, [self._stay], number, spec))
        except (RayActorError, ClosedError, UnavailableError) as error:
            self._over = find_coordinator(self.shared_name) is None or isinstance(error, ClosedError)
            raise _GoneError(f"the round {self.shared_name!r} cannot be reached: {error}") from error
        with self._lock:
            self._open.add(number)
            self.shards, self.bounds = opened.shards, opened.bounds
            if not self.incarnation:
                self.incarnation = opened.incarnation
            if self._ray.wait([self._stay], timeout=0)[0]:
                with contextlib.suppress(RayActorError, ClosedError, UnavailableError):  # the next call will say so
                    self._return(self.incarnation)
        return number, opened

    def close(self, number: int, *, for_all: bool) -> int:
        """Close a handle; return how many gradients that discarded."""
        with self._lock:
            self._open.discard(number)
        count: int = self.get(self.coordinator.close.remote(self.token, number, for_all))
        return count

    def join(self, worker: Worker) -> None:
        """Remember that a worker is live over this session."""
        if worker not in self._joined:
            with self._lock:
                self._joined.add(worker)

    def leave(self, worker: Worker) -> None:
        """Forget that a worker is live over this session."""
        with self._lock:
            self._joined.discard(worker)

    # Incarnations

    def _new_stay(self) -> Any:
        """Return the call by which the coordinator knows that this process lives."""
        stay = self.coordinator.stay.remote(self.token)
        stay.future().add_done_callback(self._come_back)
        return stay

    def _come_back(self, stay: Any) -> None:
        """Return to a coordinator that was restarted, in case this process has nothing to say to it for long."""
        from ray.exceptions import RayError

        if isinstance(stay.exception(), RayError) and self.usable:  # this is a thread of Ray's: it must not wait
            threading.Thread(target=self._try_to_come_back, name="gradquorum-return", daemon=True).start()

    def _try_to_come_back(self) -> None:
        from ray.exceptions import RayError

        with contextlib.suppress(GradQuorumError, RayError):  # the next call will say so
            self.resume(self.incarnation)

    def resume(self, seen: int, error: BaseException | None = None) -> None:
        """Find the present incarnation after `seen` has ended, and what that cost us.

        Raises:
            ClosedError: the round has been closed.
            UnavailableError: coordinator and shards do not come back.
            GradQuorumError: nobody has died: an actor has failed.
        """
        from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayActorError, RayError, RayTaskError

        if isinstance(error, (ObjectStoreFullError, OutOfDiskError)):
            raise ResourceExhaustedError(f"Ray has no memory for the gradient: {error}; nothing has changed") from error
        if isinstance(error, RayTaskError) and not isinstance(error.cause, RayError):
            raise GradQuorumError(f"an actor of the round {self.shared_name!r} failed: {error.cause!r}") from error
        deadline = time.monotonic() + _BACK_SECONDS
        with self._lock:
            while self.incarnation == seen:
                self.check()
                try:
                    resumed = self._return(seen)
                except ClosedError:
                    self._over = True
                    raise
                except RayActorError as reason:
                    self._look(reason, deadline)
                except self._ray.exceptions.GetTimeoutError as reason:
                    raise UnavailableError(f"the round {self.shared_name!r} does not come back") from reason
                else:
                    if resumed.incarnation == seen:  # a call was lost, or we shall hear why in a moment
                        time.sleep(_RETRY_SECONDS)
                        return
                    self.reason = resumed.reason
                    self.losses.void(seen, resumed)
                    self.is_durable = resumed.is_durable
                    self.incarnation = resumed.incarnation

    def _return(self, seen: int) -> Resumed:
        """Have the coordinator know, and watch, this process. With the lock."""
        asked = {*self._joined, *self.losses.workers}
        while True:
            if self._ray.wait([self._stay], timeout=0)[0]:
                self._stay = self._new_stay()
            terms = self.token, seen, [self._stay], tuple(self._open), tuple(self._joined), tuple(asked)
            resumed: Resumed = self.get(self.coordinator.resume.remote(*terms), timeout=_BACK_SECONDS)
            # If that call is over it was made to the coordinator before: this one watches nothing of ours.
            if not self._ray.wait([self._stay], timeout=0)[0]:
                return resumed

    def _look(self, reason: BaseException, deadline: float) -> None:
        """See whether a coordinator that does not answer is coming back."""
        if find_coordinator(self.shared_name) is None:
            self._over = True
            raise ClosedError("the round has been closed; make a new accumulator or group to go on") from reason
        if time.monotonic() > deadline:
            raise UnavailableError(f"the coordinator of {self.shared_name!r} does not come back: {reason}") from reason
        time.sleep(_RETRY_SECONDS)

    def raise_void(self, cause: BaseException | None = None) -> NoReturn:
        """Raise what a take hears whose round was void."""
        raise UnavailableError(
            f"the open round was void, as {self.reason}; the workers hear which of their gradients to send again"
        ) from cause
