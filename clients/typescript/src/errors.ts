/** Errors of this client. `code` is stable and the same as in Python; `retryable`: the same call may succeed later. */

import type { ErrorInfo, Generate } from "./types.js";
import type { Response } from "./response.js";

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
export class RunEnded extends TokenbusError {
  constructor(code: string, readonly response: Response, message: string) {
    super(code, `run ${response.run} ${message}`);
  }
}

export class RunFailed extends RunEnded {
  override readonly retryable: boolean;
  constructor(response: Response, readonly error: ErrorInfo) {
    super("run_failed", response, `failed: ${error.code}: ${error.message}`);
    this.retryable = error.retryable ?? false;
  }
}

export class RunIncomplete extends RunEnded {
  constructor(response: Response, readonly reason: string) {
    super("run_incomplete", response, `is incomplete: ${reason}`);
  }
}

export class RunCancelled extends RunEnded {
  constructor(response: Response, readonly reason: string | undefined) {
    super("run_cancelled", response, `was cancelled${reason ? `: ${reason}` : ""}`);
  }
}
