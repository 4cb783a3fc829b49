/** Errors of this client. `code` is stable and the same as in Python; `retryable`: the same call may succeed later. */

import type { ErrorInfo, Generate } from "./types.js";
import type { Response } from "./response.js";
import type { WaitFate } from "./waits.js";

export class TokenbusError extends Error {
  readonly retryable: boolean = false;
  constructor(readonly code: string, message: string, options?: ErrorOptions) {
    super(message, options);
    this.name = new.target.name;
  }
}

/** The server cannot be reached, or does not answer as one that is ready. */
export class ServerUnavailable extends TokenbusError {
  override readonly retryable = true;
  /** Of `publish`: what was sent, with its id. Publishing it again is the same run, even if it did arrive. */
  request?: Generate & { id: string };
  constructor(message: string, options?: ErrorOptions) {
    super("server_unavailable", message, options);
  }
}

/** The inbound stream is full, or the server has no memory left. */
export class ServerFull extends TokenbusError {
  override readonly retryable = true;
  constructor(message: string, options?: ErrorOptions) {
    super("server_full", message, options);
  }
}

/** The deployment on this server speaks another version of the wire format. */
export class DeploymentMismatch extends TokenbusError {
  constructor(message: string) {
    super("deployment_mismatch", message);
  }
}

/** The server refused a command, and will refuse it again. */
export class ServerError extends TokenbusError {
  constructor(message: string, options?: ErrorOptions) {
    super("server_error", message, options);
  }
}

/** The call took longer than its `timeoutMs`. The run continues. */
export class TimedOut extends TokenbusError {
  override readonly retryable = true;
  constructor(message: string) {
    super("timeout", message);
  }
}

/** An argument that no call accepts. */
export class InvalidArgument extends RangeError {
  readonly code = "invalid_argument";
  readonly retryable = false;
  override readonly name = "InvalidArgument";
}

/** The run was open, and the server has nothing of it any more: its keys were deleted or have expired. */
export class RunLost extends TokenbusError {
  constructor(readonly run: string) {
    super("run_lost", `run ${run} was open, and the server has nothing of it any more`);
  }
}

/** No such run is known, or no longer: its records expire. */
export class RunNotFound extends TokenbusError {
  constructor(readonly run: string) {
    super("run_not_found", `run ${run} is not known, or no longer`);
  }
}

/** The run has not ended, so it cannot be asked again. */
export class RunOpen extends TokenbusError {
  override readonly retryable = true;
  constructor(readonly run: string) {
    super("run_open", `run ${run} has not ended`);
  }
}

/** A value exceeds its limit. */
export class TooLarge extends TokenbusError {
  constructor(readonly where: string, readonly size: number, readonly limit: number, readonly unit: string) {
    super("too_large", `${where}: ${size} ${unit}, the limit is ${limit}`);
  }
}

/** An error of the blob store; its code says which: `blob_not_found`, `blob_too_large`, `blob_unavailable`, … */
export class BlobError extends TokenbusError {
  override readonly retryable: boolean;
  constructor(code: string, message: string, options?: ErrorOptions) {
    super(code, message, options);
    this.retryable = ["blob_unavailable", "blob_store_full", "blob_quota_exceeded"].includes(code);
  }
}

/** A request is refused, with what is wrong with it. */
export class RequestInvalid extends TokenbusError {
  constructor(problem: string) {
    super("request_invalid", `invalid request: ${problem}`);
  }
}

/** The session is unknown: nobody configured it, or it was deleted or has expired. */
export class SessionNotFound extends TokenbusError {
  constructor(readonly session: string) {
    super("session_not_found", `unknown session ${session}: never configured, deleted or expired`);
  }
}

/** The cursor is of a session that was deleted; there is a new one of this name. */
export class SessionReplaced extends TokenbusError {
  constructor(readonly session: string) {
    super("session_replaced", `session ${session} was deleted, and a new one has its name`);
  }
}

/** The append was sent, and nothing has accepted it yet. Repeat it with the same id, or ask for its fate. */
export class AppendPending extends TokenbusError {
  override readonly retryable = true;
  constructor(readonly session: string, readonly append: string, readonly waitedMs: number) {
    super("append_pending", `session ${session}: the append ${append} was not accepted within ${waitedMs} ms`);
  }
}

/** The run does not wait for this: it never did, or the run has ended. */
export class WaitNotFound extends TokenbusError {
  constructor(readonly run: string, readonly wait: string) {
    super("wait_not_found", `run ${run} does not wait for ${wait}: it never did, or the run has ended`);
  }
}

/** Somebody decided the wait before, or its deadline did. This decision changed nothing; `fate` is the one that counts. */
export class AlreadyDecided extends TokenbusError {
  constructor(readonly run: string, readonly fate: WaitFate) {
    super("already_decided", `run ${run}: ${fate.wait} was decided before: ${fate.decision}${fate.by ? ` by ${fate.by}` : ""}, over ${fate.door ?? "bus"}`);
  }
}

/** The decision was sent, and nothing has applied it yet. Repeat it with the same id. */
export class DecisionPending extends TokenbusError {
  override readonly retryable = true;
  constructor(readonly run: string, readonly wait: string, readonly decision: string, readonly waitedMs: number) {
    super("decision_pending", `run ${run}: the decision ${decision} on ${wait} was not applied within ${waitedMs} ms`);
  }
}

/** The run cannot be asked again. */
export class RunNotRepeatable extends TokenbusError {
  constructor(readonly run: string, why: string) {
    super("run_not_repeatable", `run ${run} cannot be repeated: ${why}`);
  }
}

/** Entries after the cursor are gone. A subscription made with its `cursor` goes on at the oldest that is kept. */
export class CursorTrimmed extends TokenbusError {
  constructor(readonly key: string, readonly cursor: string, readonly oldest: string) {
    super("cursor_trimmed", `${key}: entries after ${cursor} are gone, the oldest that is kept is ${oldest}`);
  }
}

/** The cursor is past the newest entry: it belongs to another run or deployment. */
export class CursorAhead extends TokenbusError {
  constructor(readonly key: string, readonly cursor: string, readonly newest: string) {
    super("cursor_ahead", `${key}: the cursor ${cursor} is past the newest entry, ${newest}`);
  }
}

/** An entry of a stream that is no event. */
export class Malformed extends TokenbusError {
  constructor(readonly where: string, message: string) {
    super("malformed", `${where}: ${message}`);
  }
}

/** A run that did not complete; `response` is what there is of it. */
export class RunError extends TokenbusError {
  constructor(code: string, readonly response: Response, message: string) {
    super(code, `run ${response.run} ${message}`);
  }
}

export class RunFailed extends RunError {
  override readonly retryable: boolean;
  constructor(response: Response, readonly error: ErrorInfo) {
    super("run_failed", response, `failed: ${error.code}: ${error.message}`);
    this.retryable = error.retryable ?? false;
  }
}

export class RunIncomplete extends RunError {
  constructor(response: Response, readonly reason: string) {
    super("run_incomplete", response, `is incomplete: ${reason}`);
  }
}

export class RunCancelled extends RunError {
  constructor(response: Response, readonly reason: string | undefined) {
    super("run_cancelled", response, `was cancelled${reason ? `: ${reason}` : ""}`);
  }
}
