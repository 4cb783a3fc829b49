/** Finds the `tokenbus up` that runs in this directory, by the file in its data directory. */

import { readFileSync, statSync } from "node:fs";
import { join } from "node:path";

export interface Running {
  redis_url?: string;
  blobs_url?: string;
  /** Its blob service answers with this id. */
  deployment?: string;
}

/**
 * What its file says; undefined if none runs. Node cannot see the lock with which Python knows for sure, so a process
 * must have the id in the file, and the file must be this user's.
 */
export function localUp(): Running | undefined {
  const file = join(process.env["TOKENBUS_DATA"] || ".tokenbus", "up.json");
  try {
    if (process.getuid?.() !== statSync(file).uid) return undefined;
    const { pid, ...running } = JSON.parse(readFileSync(file, "utf8")) as Running & { pid?: unknown };
    if (typeof pid !== "number") return undefined;
    process.kill(pid, 0); // throws if there is no such process
    return running;
  } catch {
    return undefined;
  }
}
