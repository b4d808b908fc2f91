"""The keeper: one small process that starts the processes of a launch, watches them, and ends them together.

    ds run  --socket-->  keeper  --forks-->  rank 0, rank 1, ...  -->  their own children

- It is the *subreaper* of everything below it: whatever a rank leaves behind becomes the keeper's child, so "no survivor"
  is a fact it can check (it has no child left) and not a guess by name or group.
- The ranks die with it (PDEATHSIG). `ds run` is a subreaper too: it gets what the ranks leave if the keeper is killed.
- The socket carries the launch in, then one byte per signal. Its end means that `ds run` is gone: everything is stopped.
- It leads a session of its own and its command line names no script, so neither Ctrl-C nor `pkill -f train.py` hits it.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from enum import Enum

from ds_launcher.child import HANDLED, Child, OutputStream, start_child
from ds_launcher.failures import Ending, closing_lines, exit_status, explain, first_failure
from ds_launcher.forked import BecomeRank, Forks, become
from ds_launcher.heartbeat import CENTRE, Heartbeat, HeartbeatSocket, JobEnd
from ds_launcher.launch_plan import LaunchPlan
from ds_launcher.link import receive_launch
from ds_launcher.output import Screen
from ds_launcher.procfs import USER_SIGNALS, Proc, adopt_orphans, descendants, kill_descendants, send, stopped

__all__ = ["LaunchSupervisor", "main"]

_LEAST_SETTLE_S, _SETTLE_S = 0.1, 3.0
_LEAVE_S = 2.0
_TELL_S = 1.0  # after which who is waited for is told
_KILL_S = 5.0
_STANDS_S = 5.0  # after which a process that a signal stopped is told
_LAST_WORDS_S = 0.5
_TICK_S = 0.02
_CANNOT_START = 127


class _LaunchState(Enum):
    """In this order, never back; some are left out."""

    RUNNING = "nobody failed, nobody asked us to stop"
    SETTLING = "one failed; those that began to fail at the same time may end by themselves, to see who was first"
    STOPPING = "all were asked to end"
    LEAVING = "all ended by themselves; what they left behind was asked to end"
    KILLING = "whoever is left is killed"


class LaunchSupervisor:
    """Runs one launch to its end.

    Args:
        launch: what to run.
        control: the socket to `ds run`.
        screen: where output goes; not started yet.
    """

    def __init__(self, launch: LaunchPlan, control: socket.socket, screen: Screen) -> None:
        self._launch, self._control, self._screen = launch, control, screen
        self._children: list[Child] = []
        self._selector = selectors.DefaultSelector()
        self._open_streams = 0
        self._state, self._began_s = _LaunchState.RUNNING, time.monotonic()
        self._signal = 0  # the first one that asked us to stop
        self._told_of_grace = False
        self._look_s = 0.0  # when to look for stopped processes again
        self._status: int | None = None  # decided without any rank's ending
        self._caught = _caught_signals()
        self._job_end: JobEnd | None = None  # why the job ends, by the host that knew first
        self._line = _line(launch, self._say)
        self._adopts = False  # whether orphans become our children; then nobody can be missed

    def run(self) -> int:
        """Start everything, wait until nobody is left, say who failed first, return the exit status."""
        self._adopts = adopt_orphans()
        self._watch(self._control, self._on_control)
        self._watch(self._caught[0], self._on_own_signal)
        if self._line is not None:
            self._watch(self._line.socket, self._on_datagram)
        if self._launch.stop_on_eof:
            self._watch(sys.stdin, self._on_stdin)
        self._start_all()
        self._screen.start()  # a thread: nothing is forked after it
        while not self._finished():
            self._dispatch(self._patience_s())
            self._reap()
            self._beat()
            self._advance()
        # Nobody can write any more: each pipe comes to its end. Who stopped us does not wait for a screen nobody reads.
        while self._open_streams and not (self._signal and self._screen.full) and self._dispatch(1.0):
            pass
        status = self._report()
        self._part(status)
        self._show_rest()
        return status

    # -- events

    def _watch(self, file: object, callback: Callable[[], None]) -> None:
        self._selector.register(file, selectors.EVENT_READ, callback)  # type: ignore[arg-type]

    def _start_all(self) -> None:
        forks = Forks(self._launch.processes, self._control)
        self._drop_early()
        for process in self._launch.processes:
            try:
                child, streams = start_child(process, self._screen, forks)
            except OSError as error:
                self._say(f"{process.name} could not be started: {error}")
                self._status = _CANNOT_START
                self._stop(signal.SIGTERM)
                return
            self._children.append(child)
            for stream in streams:
                self._open_streams += 1
                self._watch(stream.pipe, lambda stream=stream: self._on_output(stream))  # type: ignore[misc]
            if child.pidfd is not None:
                self._watch(child.pidfd, lambda child=child: self._on_exit(child))  # type: ignore[misc]

    def _drop_early(self) -> None:
        """Forget signals of the user that came before there was a rank: none could have a handler, and a new one dies of them."""
        with contextlib.suppress(BlockingIOError):
            early = self._control.recv(64, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            if early and all(number in USER_SIGNALS for number in early):
                self._control.recv(len(early))

    def _dispatch(self, timeout_s: float) -> bool:
        """Handle what happened, in the order in which it did. False when nothing did."""
        events = self._selector.select(timeout_s)
        for key, _ in events:
            key.data()
        if self._screen.full:
            time.sleep(_TICK_S)  # nobody reads us: let the ranks wait too, but keep watching
        return bool(events)

    def _on_output(self, stream: OutputStream) -> None:
        if self._screen.full:
            return
        pipe = stream.pipe
        fd = pipe.fileno()
        if not stream.read(self._screen):
            self._selector.unregister(fd)
            self._open_streams -= 1

    def _on_control(self) -> None:
        try:
            data = self._control.recv(64)
        except ConnectionError:
            data = b""
        for number in data:
            self._on_signal(number)
        if not data:
            self._selector.unregister(self._control)
            if self._state in (_LaunchState.RUNNING, _LaunchState.SETTLING):
                self._on_signal(signal.SIGTERM)

    def _on_own_signal(self) -> None:
        for number in self._caught[0].recv(64):
            if number != signal.SIGCHLD:
                self._on_signal(number)

    def _on_stdin(self) -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            self._selector.unregister(sys.stdin)
            self._on_signal(signal.SIGTERM)

    def _on_datagram(self) -> None:
        for message in self._line.listen(time.monotonic()) if self._line is not None else ():
            if message.job_end is not None:
                self._on_told(message.job_end, last=message.bye)

    def _beat(self) -> None:
        if self._line is not None:
            now_s = time.monotonic()
            self._line.speak(now_s)
            if (job_end := self._line.beats.lost(now_s)) is not None:
                self._on_told(job_end)

    def _on_told(self, job_end: JobEnd, *, last: bool = False) -> None:
        """Stop the job on this host because another host failed or was lost.

        The last notice (`last`) also sets the exit status while stopping, which mpirun may not report.
        """
        if last and self._job_end is None and self._state is _LaunchState.STOPPING:
            self._job_end = job_end
        if (
            self._job_end is None
            and self._state in (_LaunchState.RUNNING, _LaunchState.SETTLING)
            and self._first() is None
        ):
            self._job_end = job_end
            self._stop(signal.SIGTERM)

    def _on_signal(self, number: int) -> None:
        if number in USER_SIGNALS:
            self._pass_on(number)
            return
        self._signal = self._signal or number
        if self._state in (_LaunchState.RUNNING, _LaunchState.SETTLING):
            self._stop(number)
        else:
            self._enter(_LaunchState.KILLING)  # asked again: no more waiting

    def _pass_on(self, number: int) -> None:
        """Send a signal of the user to the ranks themselves, not to what they started; the job goes on as it does."""
        for child in self._running():
            if child.process.user_signals:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.popen.pid, number)
        left_out = [child.process.name for child in self._running() if not child.process.user_signals]
        if left_out:
            self._say(
                f"{signal.Signals(number).name} does not reach {', '.join(left_out[:3])}{', ...' if len(left_out) > 3 else ''}: "
                "ssh and pdsh carry no signals; send it to `ds run` on that host, or use srun or mpirun"
            )

    def _on_exit(self, child: Child) -> None:
        if child.pidfd is not None:
            self._selector.unregister(child.pidfd)
        child.reap()
        if child.code != 0 and self._state is _LaunchState.RUNNING:
            self._enter(_LaunchState.SETTLING)

    # -- the way to the end

    def _enter(self, state: _LaunchState) -> None:
        if state is not self._state:
            self._state, self._began_s = state, time.monotonic()

    def _advance(self) -> None:
        since_s = time.monotonic() - self._began_s
        running = self._running()
        if self._state is _LaunchState.RUNNING:
            self._tell_of_stopped(running)
            if not running:
                self._leave()
        elif self._state is _LaunchState.SETTLING:
            failing = [
                child for child in running if child.traceback_s and child.traceback_s > self._began_s - _SETTLE_S
            ]
            if not running or since_s > (_SETTLE_S if failing else _LEAST_SETTLE_S):
                self._stop(signal.SIGTERM)
        elif self._state is _LaunchState.STOPPING:
            self._wait_for_ends(running, since_s)
        elif self._state is _LaunchState.LEAVING and (
            not self._others() or since_s > min(_LEAVE_S, self._launch.grace_s)
        ):
            self._enter(_LaunchState.KILLING)
        if self._state is _LaunchState.KILLING:
            self._kill()

    def _tell_of_stopped(self, running: list[Child]) -> None:
        """Name the processes that a signal has stopped: the launch waits for them, and they cannot say why themselves."""
        now_s = time.monotonic()
        if now_s < self._look_s:
            return
        self._look_s = now_s + 1.0
        for child in running:
            pid = child.popen.pid
            if not stopped(pid):
                child.stands_since_s = None
            elif child.stands_since_s is None:
                child.stands_since_s = now_s
            elif now_s - child.stands_since_s > _STANDS_S:
                child.stands_since_s = math.inf
                self._say(
                    f"{child.process.name} (process {pid}) was stopped by a signal and is waited for: "
                    f"`kill -CONT {pid}` lets it go on, Ctrl-C ends the job"
                )

    def _wait_for_ends(self, running: list[Child], since_s: float) -> None:
        """Wait for the processes that were asked to end, which may be saving, for as long as `--grace` says; tell whom and how long."""
        grace_s = self._launch.grace_s
        names = [child.process.name for child in running]
        who = f"{', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"
        if not running or since_s > grace_s:
            if running:
                self._say(f"{who} did not end within {grace_s:g} s and will be killed; --grace gives more time")
            self._enter(_LaunchState.KILLING)
        elif since_s > _TELL_S and not self._told_of_grace:
            self._told_of_grace = True
            self._say(f"waiting up to {grace_s:g} s for {who} to end (--grace)")

    def _stop(self, number: int) -> None:
        """Ask every process to end."""
        self._enter(_LaunchState.STOPPING)
        self._tell_others()
        for child in self._running():
            child.stop_requested = True
            with contextlib.suppress(ProcessLookupError):
                # Not reaped, so the id is still this child's, and so is the group of that number, which it leads.
                (os.killpg if child.process.group else os.kill)(child.popen.pid, number)

    def _tell_others(self) -> None:
        """Send the other hosts how the job ended here, so that they need not wait for a timeout.

        The network may be intact where a host is not.
        """
        watch = self._launch.watch
        if self._line is None or watch is None:
            return
        here, first = "" if watch.member < 0 else watch.names[watch.member], self._first()
        job_end = self._job_end
        if job_end is None and first is not None and here:
            name = self._children[first.index].process.name
            job_end = JobEnd(
                here, f"{name} on host {here} failed first ({explain(first.code)})", exit_status(first.code)
            )
        if job_end is None and self._signal:
            where = f"on host {here}" if here else "where `ds run` was started"
            job_end = JobEnd("", f"stopped by {signal.Signals(self._signal).name} {where}", 128 + self._signal)
        if job_end is not None:
            self._line.tell(Heartbeat(watch.member, job_end))

    def _part(self, status: int) -> None:
        watch = self._launch.watch
        if self._line is not None and watch is not None and (status == 0 or watch.member == CENTRE):
            job_end = (
                JobEnd("", f"the ranks on host {watch.names[CENTRE]} ended with {status}", status) if status else None
            )
            self._line.tell(Heartbeat(watch.member, job_end, bye=True))

    def _leave(self) -> None:
        """Stop the processes that the ranks left running, after all ranks ended well."""
        self._enter(_LaunchState.LEAVING)
        left = self._others()
        if left:
            self._say(f"all ranks ended; stopping what they left running: process {_ids(left)}")
        for proc in left:
            send(proc, signal.SIGTERM)

    def _kill(self) -> None:
        # Without adoption the group of a rank that ended is the only way to what it left.
        for child in self._running() if self._adopts else self._children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.popen.pid, signal.SIGKILL)
        for proc in self._others():
            send(proc, signal.SIGKILL)

    def _running(self) -> list[Child]:
        return [child for child in self._children if child.running]

    def _others(self) -> list[Proc]:
        """List the living descendants that are not processes of the launch."""
        launched = {child.popen.pid for child in self._running()}
        return [proc for proc in descendants(os.getpid()) if not proc.zombie and proc.pid not in launched]

    def _reap(self) -> None:
        """Collect the exits of adopted processes; without a pidfd, handle the ends of launched processes."""
        for child in self._running():
            if child.pidfd is None and child.popen.poll() is not None:
                self._on_exit(child)
        if not self._adopts:
            return
        launched = {child.popen.pid for child in self._running()}
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if ended.si_pid in launched:
                    return  # its turn comes with its pidfd
                os.waitpid(ended.si_pid, 0)

    def _patience_s(self) -> float:
        watched = all(child.pidfd is not None for child in self._children)
        long_s = 1.0 if self._line is None else min(1.0, self._line.beats.period_s)
        return long_s if self._state is _LaunchState.RUNNING and watched and self._running() else _TICK_S

    def _finished(self) -> bool:
        if self._state is not _LaunchState.KILLING:
            return False
        left = [child.popen.pid for child in self._running()] + [proc.pid for proc in self._others()]
        if left and time.monotonic() - self._began_s < _KILL_S:
            return False
        if left:
            self._say(f"could not be killed: process {', '.join(map(str, left))}")
        return True

    # -- the last words

    def _show_rest(self) -> None:
        """Wait for a slow reader (`| less`) as any program would, but not when we were told to stop."""
        while not self._screen.finish(_TICK_S) and not self._signal:
            self._dispatch(_TICK_S)
        self._screen.finish(_LAST_WORDS_S)

    def _first(self) -> Ending | None:
        """Return the ended process that failed first.

        Where a job of many hosts was started, prefer the host that a notice named.
        """
        endings = [child.ending(index) for index, child in enumerate(self._children) if not child.running]
        if self._job_end is not None and self._job_end.host:
            named = f"host {self._job_end.host}"
            endings = [e for e in endings if self._children[e.index].process.name == named] or endings
        return first_failure(endings)

    def _report(self) -> int:
        first = self._first()
        if self._status is not None:
            return self._status
        if first is None:
            # A host that failed counts though those here ended well; so does what mpirun says, which may end with 0 all the same.
            if self._job_end is not None and (
                self._job_end.host or self._signal or any(c.code for c in self._children)
            ):
                self._say(self._job_end.text)
                return self._job_end.status
            if not any(child.code for child in self._children):
                return 0  # also after a signal: ranks that save and end well did what was asked
            self._say(f"stopped by {signal.Signals(self._signal).name}")
            return 128 + self._signal
        child = self._children[first.index]
        last = closing_lines(list(child.tail))
        if len(self._children) > 1 or child.process.prefix or not last:
            others = "; the others were stopped" if len(self._children) > 1 else ""
            log = f"; its output is in {child.process.log}" if child.process.log else ""
            silent = "" if last else " without a word on standard error"
            self._say(f"{child.process.name} failed first{silent} ({explain(first.code)}){others}{log}")
            for line in last:
                self._screen.line("err", b"", line)
        return exit_status(first.code)

    def _say(self, text: str) -> None:
        self._screen.line("err", b"ds run: ", text.encode(errors="replace"))


def _line(launch: LaunchPlan, say: Callable[[str], None]) -> HeartbeatSocket | None:
    try:
        return HeartbeatSocket(launch.watch) if launch.watch is not None else None
    except socket.gaierror:  # a name that only ssh's settings know; ranks that need it say so themselves
        return None
    except OSError as error:
        say(f"the hosts cannot notice each other's end: {error.strerror} (UDP port {launch.watch.port})")  # type: ignore[union-attr]
        return None


def _ids(processes: list[Proc]) -> str:
    return ", ".join(str(proc.pid) for proc in processes)


def _caught_signals() -> tuple[socket.socket, socket.socket]:
    """Create a socket pair whose first end receives the numbers of caught signals.

    SIGCHLD is among them, to wake the event loop.
    """
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, lambda number, frame: None)
    return reading, writing


def main(argv: list[str]) -> int:
    """Run `python -m ds_launcher.keeper FD`: FD is the socket to `ds run`."""
    control = socket.socket(fileno=int(argv[0]))
    for number in (*HANDLED, *USER_SIGNALS):
        if number != signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)
    try:
        launch = receive_launch(control)
    except EOFError:
        return 128 + signal.SIGTERM
    screen = Screen({"out": sys.stdout.buffer, "err": sys.stderr.buffer})
    try:
        status = LaunchSupervisor(launch, control, screen).run()
    except BecomeRank as rank:  # in a fork
        process = rank.process
    except BaseException:
        kill_descendants(timeout_s=_KILL_S)  # an error of our own
        raise
    else:
        kill_descendants(timeout_s=_KILL_S)  # nobody is left
        return status
    del control, launch, screen
    become(process)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
