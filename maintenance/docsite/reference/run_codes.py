"""The error codes and classes with which the bus itself ends a run. A test compares them with the code."""

from __future__ import annotations

from typing import NamedTuple

from tokenbus.events.error_info import ErrorClass


class Told(NamedTuple):
    """One code: its class, whether the same call may succeed later, and when it comes."""

    kind: ErrorClass
    retryable: bool
    when: str


CLASSES: dict[ErrorClass, str] = {
    "auth": "A key is missing, refused, or may not do this.",
    "rate_limit": "The provider, or a limit of this deployment, allows no more calls for now.",
    "overloaded": "The provider or the server has no capacity for now.",
    "invalid_request": "The request is wrong. Change it before sending it again.",
    "not_found": "The provider does not know the model or the file.",
    "content_filter": "The provider or a policy stopped the answer.",
    "timeout": "Nothing came in time.",
    "network": "The connection failed or broke.",
    "server": "The provider, or the blob store, failed.",
    "protocol": "An answer broke the rules of its API.",
    "limit": "Something is larger than a limit of the settings.",
    "tool": "A tool failed.",
    "internal": "A fault inside the bus or its server.",
    "unknown": "None of these.",
}

CODES: dict[str, Told] = {
    "answer_chunks": Told("limit", False, "The answer's HTTP chunks are not framed within the limits."),
    "call_timeout": Told("timeout", False, "The call took longer than the provider's `call_timeout_s`."),
    "image_not_stored": Told(
        "internal", True, "The blob store did not take an image, and it is too large for an event."
    ),
    "job_expired": Told("timeout", False, "The provider did not run a job in the background in its time."),
    "job_timeout": Told("timeout", False, "A job in the background took longer than the provider's `job_timeout_s`."),
    "no_progress": Told("timeout", True, "The stream brought only pings and comments for `progress_timeout_s`."),
    "answer_head": Told("protocol", False, "The answer's HTTP head is over its limit."),
    "answer_too_large": Told("limit", False, "The answer has more bytes than `limits.answer_bytes`."),
    "auth_unavailable": Told("auth", True, "The `auth` of the provider could not get a token."),
    "body_encoding": Told("protocol", False, "The answer has a content encoding that nobody asked for."),
    "body_ratio": Told("limit", False, "The answer grows too much when it is decompressed."),
    "body_undecodable": Told("protocol", True, "The compressed answer cannot be decompressed."),
    "cancelled": Told("unknown", False, "The provider cancelled the response."),
    "child_lost": Told("internal", False, "Of a child run: it ended, and nothing of it was left to read."),
    "connect_timeout": Told("timeout", True, "No connection within `connect_timeout_s`."),
    "deadline": Told("timeout", False, "The request's `deadline_s` passed."),
    "disk": Told("internal", True, "The fetcher's disk could not hold an image."),
    "finish_error": Told("server", True, "The provider ended the answer with an error as its finish reason."),
    "frames_lost": Told("network", True, "Part of the provider's stream is missing on the bus."),
    "key_missing": Told("auth", False, "The environment variable of the key is not set."),
    "key_unusable": Told("auth", False, "The key cannot be put into an HTTP header."),
    "limit_wait": Told("rate_limit", False, "The run waited too long for its turn under `[limits]`."),
    "lost": Told("internal", True, "Nothing has worked on the run for too long, or its keys expired."),
    "message_restarted": Told("protocol", True, "The provider began its message a second time."),
    "network": Told("network", True, "The connection to the provider failed."),
    "poison": Told("internal", False, "Workers died on it, one after the other."),
    "policy_silent": Told("timeout", True, "No policy worker judged the run in time."),
    "policy_terminated": Told("content_filter", False, "A policy ended the run."),
    "run_too_large": Told("limit", False, "The run says more than `limits.run_bytes`."),
    "server_full": Told("overloaded", True, "The server has no room for what the run says."),
    "server_lost_writes": Told("internal", False, "The server failed over and forgot events that were out already."),
    "state_unreadable": Told("internal", False, "The run's checkpoint cannot be read."),
    "steered": Told("internal", False, "Not an error: a message of the session ended the call, and another follows."),
    "stream_cut": Told("network", True, "The provider's stream broke off."),
    "too_many_events": Told("limit", False, "The run has more input events than `limits.run_events`."),
    "turn_too_large": Told("limit", False, "A turn says more than `limits.turn_bytes`."),
    "upload_refused": Told("protocol", False, "The provider's file store gave an upload address on another host."),
    "upload_too_slow": Told("timeout", True, "An upload to the provider's file store dripped."),
    "worker_lost": Told("internal", True, "The fetcher of the run died in the middle of a call."),
}
