"""Asks a job that runs, for commands of dtrun: an answer, or an error that they print."""

from __future__ import annotations

from typing import TypeVar

from ..runtime.host.job_sockets import FoundJob, JobRequest, Refusal, ask

A = TypeVar("A")


class NotDone(Exception):
    """A command that can't be done, and why."""


def answer(job: FoundJob, request: JobRequest, kind: type[A], *timeout: float) -> A:
    """Asks a job. Raises JobSocketError, NotDone where it refuses."""
    found = ask(job, request, *timeout)
    if isinstance(found, kind):
        return found
    raise NotDone(f"job {job.pid}: {found.why if isinstance(found, Refusal) else 'another answer than was asked for'}")


def clock(seconds: float) -> str:
    """Returns a time as clocks show it: 00:12:31."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest:02}"
