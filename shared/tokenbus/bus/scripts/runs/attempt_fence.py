"""Fences a run's raw frames: only the current attempt's one writer appends, and each frame once."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenbus.bus.scripts.script import MAX_VALUES, Arg, ScriptCall, script


class RawPart(msgspec.Struct, frozen=True):
    """One run's part of a raw append: frame ``n`` (or ANY_FRAME), and whether it is the attempt's last."""

    run: str
    run_key: str
    attempt: int
    n: int
    final: bool
    data: bytes
    writer: str = ""
    """Unique name of the writer of the attempt's frames. Ignored for ANY_FRAME."""
    job: bytes = b""
    """How far this frame brings the provider's job, for the run's hash; empty: the frame changes nothing of it."""


def append_raw(
    raw: str, normalizer_lease: str, parts: Sequence[RawPart], *, policy_lease: str | None = None
) -> ScriptCall:
    """Write frames of several runs of one partition as one entry; each run is checked on its own.

    ``parts`` holds each run at most once. Reply, for each part: ``ok``, ``already`` (this frame is in; its reply was
    lost), ``full`` (the server has memory only for frames that end attempts: retry), or why it is refused (``gone``, a
    status, ``attempt N``, ``closed``, ``frame N``, ``writer W``, or ``taken``: see `take_job`). Then the normalizer's
    lag in bytes and, with ``policy_lease``, the policy stage's. The writer of frame 0 must write all frames of the
    attempt. If a server loses the fact that it handed out the attempt and gives it to a second worker, the frames of
    the two therefore never mix.

    A run whose hash has the field ``record`` is recorded: its frames are also kept in the hash as
    ``frame:<attempt>:<n>`` until the byte budget in that field is used up.
    """
    flat: list[Arg] = []
    for p in parts:
        flat += (p.run, p.attempt, p.n, 1 if p.final else 0, p.data, p.writer, p.job)
    return _append_raw(
        raw,
        normalizer_lease,
        policy_lease or normalizer_lease,
        [p.run_key for p in parts],
        policy_lag=1 if policy_lease else 0,
        parts=flat,
    )


@script(MAX_VALUES=MAX_VALUES)
def _append_raw(
    raw: str,
    normalizer_lease: str,
    policy_lease: str,
    run_keys: Sequence[str],
    *,
    policy_lag: int,
    parts: Sequence[Arg],
) -> ScriptCall: ...


@script()
def take_job(run_key: str, *, attempt: int, writer: str) -> ScriptCall:
    """Become the writer of an open attempt that has a job at its provider; its earlier writer's frames are refused
    then as ``taken``, which ends nothing. Reply: the number of frames, the job, and how often it was taken since it
    last made progress; or nothing if the attempt is over, or has no job.
    """
    ...
