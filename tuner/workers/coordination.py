"""The workers of one study: who decides, who measures what, and who of them still lives.

Workers share nothing but the study's storage. Its trials are Optuna's, and so are the heartbeats. Beside the
study NAME there is a second one, ``NAME/workers``, whose trials are not configs but

- memberships: one a worker, RUNNING as long as it lives, kept alive by heartbeats;
- tickets: one for each time that a worker asks for something of which there must be one. The running ticket
  with the lowest number holds it. Numbers are given by the database, so that there is no race to win.

Only one worker at a time proposes (:meth:`Coordination.turn`), and all measure at the same time. A trial
names its worker; one whose worker is dead is queued again in the next turn.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState, create_trial

from tuner.runs.interrupts import Interrupts
from tuner.search.study import Proposal, Study
from tuner.workers.machine import Machine
from tuner.workers.storage import SharedStorage, WorkerStorage, experimental

MEMBERSHIP, TURN = "membership", "turn"
SEED_STEP = 7919
"""Between the seeds of two workers' samplers: more than a study has trials."""


class Coordination:
    """The workers of a study that this process has to itself: there is no other to wait for."""

    shared = False
    seed_offset = 0
    """For the samplers of several workers, which must not propose the same."""

    @contextmanager
    def turn(self, study: Study) -> Iterator[None]:
        """The right to propose: what the study holds is this worker's alone to decide on."""
        yield

    @contextmanager
    def sole(self, role: str, done: Callable[[], bool]) -> Iterator[bool]:
        """True for the one worker that does what must be done once; False where it is ``done`` already."""
        yield not done()

    def begins(self, proposal: Proposal) -> None:
        """This worker is going to measure ``proposal``; called in its turn."""

    def recover(self, study: Study) -> int:
        """Queue again what dead processes left; returns how many trials."""
        return study.recover()

    def settled(self, study: Study) -> bool:
        """Waits until no other worker measures. False: one has died, and its trial is queued again."""
        return True


class SharedCoordination(Coordination):
    """One of the workers of a study on a shared storage. A context manager: within it, the worker lives."""

    shared = True

    def __init__(
        self,
        storage: WorkerStorage,
        record: optuna.Study,
        machine: Machine,
        note: Callable[[str], None] = lambda text: None,
        poll: float = 0.5,
    ) -> None:
        """``poll``: seconds between two looks at what another worker does."""
        self.machine, self._note, self._poll = machine, note, poll
        self._configs = storage
        self._heartbeats = storage.open_heartbeats()
        self._storage = SharedStorage(self._heartbeats, storage.retry, max_age=0.0)  # who lives changes
        name = f"{record.study_name}/workers"
        self._tickets = optuna.create_study(storage=self._storage, study_name=name, load_if_exists=True)
        self._pulse = HeartbeatThread(self._heartbeats, storage.heartbeat.interval)
        self._differing: set[str] = set()
        self._next_check = time.monotonic()
        self.id = ""
        self._register()

    def __enter__(self) -> SharedCoordination:
        self._pulse.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._pulse.stop()
        with contextlib.suppress(optuna.exceptions.StorageInternalError):  # then others see it by the pulse
            for ticket in self._running():
                if ticket.user_attrs["worker"] == self.id:
                    self._close(ticket.number)
        self._storage.close()

    @contextmanager
    def turn(self, study: Study) -> Iterator[None]:
        with self._turn() as living:
            self._requeue_lost(study, living)
            yield

    @contextmanager
    def sole(self, role: str, done: Callable[[], bool]) -> Iterator[bool]:
        ticket = self._claim(role, done)
        if ticket is None:
            yield False
            return
        try:
            yield True
        finally:
            self._close(ticket)

    def begins(self, proposal: Proposal) -> None:
        proposal.trial.set_user_attr("worker", {"id": self.id, **self.machine.to_json()})

    def recover(self, study: Study) -> int:
        """Left to every turn, which knows who lives."""
        return 0

    def settled(self, study: Study) -> bool:
        told = False
        while True:
            living = self._living()
            running = [t for t in study.running if _worker(t) != self.id]
            if not running:
                return True
            if any(_worker(t) not in living for t in running):
                with self._turn() as now_living:
                    if self._requeue_lost(study, now_living):
                        return False
                continue
            if not told:
                self._note(f"waiting for {len(running)} trial(s) of other workers")
                told = True
            time.sleep(self._poll)

    def _requeue_lost(self, study: Study, living: set[str]) -> int:
        """Queue again what dead workers left; returns how many trials."""
        lost = study.recover(lambda trial: _worker(trial) not in living)
        if lost:
            self._note(f"{lost} trial(s) whose worker died will be tried again")
        return lost

    def _register(self) -> None:
        """Become a member, or become one again after others took this worker for dead."""
        self.id = uuid.uuid4().hex[:12]
        number = self._ticket(MEMBERSHIP, **self.machine.to_json())
        self.seed_offset = SEED_STEP * number
        study_id = self._storage.get_study_id_from_name(self._tickets.study_name)
        self._pulse.trial_id = self._storage.get_trial_id_from_study_id_trial_number(study_id, number)
        self._configs.retry.call(self._pulse.beat)
        self._warn_of_others()

    def _warn_of_others(self) -> None:
        """Measurements of different machines differ, and the search takes them for the configs' doing."""
        members = [t for t in self._tickets.get_trials(deepcopy=False) if _is_a(MEMBERSHIP, t)]
        hardware = {t.user_attrs["hardware"] for t in members}
        if differing := hardware - self._differing - {self.machine.hardware}:
            self._differing |= differing
            self._note(
                f"the workers' machines differ ({self.machine.hardware}; {'; '.join(sorted(differing))}): "
                "what one measures does not hold for another. Use one kind of machine per study"
            )

    @contextmanager
    def _turn(self) -> Iterator[set[str]]:
        """Yields the ids of the workers that live, while no other worker has its turn."""
        mine = self._ticket(TURN)
        try:
            pause = 0.02
            while True:
                tickets = self._running()
                living = self._living(tickets)
                if self.id not in living:
                    self._close(mine)
                    self._register()
                    mine = self._ticket(TURN)
                    continue
                queue = [t for t in tickets if _is_a(TURN, t) and _worker_id(t) in living]
                ahead = [t for t in queue if t.number < mine]
                if not ahead:
                    break
                time.sleep(min(pause, self._poll))
                pause *= 1.5
            self._warn_of_others()
            self._configs.refresh()
            yield living
        finally:
            self._close(mine)

    def _claim(self, role: str, done: Callable[[], bool]) -> int | None:
        told = False
        while not done():
            if not (holders := self._holders(role)):
                with self._turn():
                    if done():
                        return None
                    if not self._holders(role):
                        return self._ticket(role)
                continue
            if not told:
                self._note(f"{role}: left to the worker on {holders[0]}; waiting for it")
                told = True
            time.sleep(self._poll)
        return None

    def _holders(self, role: str) -> list[str]:
        """Hosts of living workers that have the role: one or none."""
        tickets = self._running()
        living = self._living(tickets)
        return [t.user_attrs["host"] for t in tickets if _is_a(role, t) and _worker_id(t) in living]

    def _living(self, tickets: Sequence[FrozenTrial] | None = None) -> set[str]:
        """Ids of the workers that live, by ``tickets`` that run (those of now)."""
        return {_worker_id(t) for t in tickets or self._running() if _is_a(MEMBERSHIP, t)}

    def _running(self) -> list[FrozenTrial]:
        """The tickets and memberships that run; now and then those of dead workers are found out first.

        After the database was away no worker is judged for a while, for none could beat.
        """
        now = time.monotonic()
        if now >= self._next_check and now - self._pulse.steady_since >= self._configs.heartbeat.grace:
            self._configs.retry.call(self._fail_stale)
            self._next_check = now + self._configs.heartbeat.interval
        return self._tickets.get_trials(deepcopy=False, states=(TrialState.RUNNING,))

    def _fail_stale(self) -> None:
        """Of tickets and memberships, end those of workers whose heartbeats have stopped."""
        study = optuna.load_study(study_name=self._tickets.study_name, storage=self._heartbeats)
        with experimental():
            optuna.storages.fail_stale_trials(study)

    def _ticket(self, role: str, **attributes: Any) -> int:
        """A new ticket's number."""
        token = uuid.uuid4().hex
        attributes = {
            "role": role,
            "worker": self.id,
            "token": token,
            "host": self.machine.host,
            **attributes,
        }
        self._tickets.add_trial(create_trial(state=TrialState.RUNNING, user_attrs=attributes))
        # A reply that was lost with its connection may have left two of them; the later one is void.
        found = [t.number for t in self._running() if t.user_attrs["token"] == token]
        for superfluous in found[1:]:
            self._close(superfluous)
        return found[0]

    def _close(self, number: int) -> None:
        with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):  # others closed it just now
            self._tickets.tell(number, state=TrialState.PRUNED, skip_if_finished=True)


def join(
    storage: optuna.storages.RDBStorage | WorkerStorage,
    record: optuna.Study,
    note: Callable[[str], None],
    interrupts: Interrupts,
) -> AbstractContextManager[Coordination]:
    """Become one of the study's workers, or the only one where its storage is not shared."""
    if not isinstance(storage, WorkerStorage):
        return contextlib.nullcontext(Coordination())
    storage.retry.notify, storage.retry.stopping = note, lambda: interrupts.seen
    return SharedCoordination(storage, record, Machine.here(), note)


class HeartbeatThread:
    """Heartbeats of one worker, from a thread of its own."""

    def __init__(self, storage: optuna.storages.RDBStorage, interval: float) -> None:
        """``interval``: seconds. A beat never waits for a database that is away: a late one has no use."""
        self._storage, self._interval = storage, interval
        self.trial_id = -1
        self.steady_since = -math.inf
        """On the monotonic clock: no beat has failed since."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat_on, name="vtune-pulse", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def beat(self) -> None:
        self._storage.record_heartbeat(self.trial_id)

    def try_to_beat(self) -> None:
        """Errors of the database are left to the thread that works with it."""
        try:
            self.beat()
        except Exception:
            self.steady_since = math.inf
        else:
            self.steady_since = min(self.steady_since, time.monotonic())

    def _beat_on(self) -> None:
        try:
            while not self._stop.wait(self._interval):
                self.try_to_beat()
        finally:
            self._storage.remove_session()


def _is_a(role: str, ticket: FrozenTrial) -> bool:
    return bool(ticket.user_attrs["role"] == role)


def _worker_id(ticket: FrozenTrial) -> str:
    return str(ticket.user_attrs["worker"])


def _worker(trial: FrozenTrial) -> str:
    """The id of the worker that measures ``trial``; "" for one that died before it had said so."""
    return str(trial.user_attrs.get("worker", {}).get("id", ""))
