/** Finds the `tokenbus up` that runs in this directory, by the file in its data directory. */

import { readFileSync, statSync } from "node:fs";
import { join } from "node:path";

/**
 * The address of its server; undefined if none runs. Node cannot see the lock with which Python knows for sure, so a
 * process must have the id in the file, and the file must be this user's.
 */
export function localUrl(): string | undefined {
  const file = join(process.env["TOKENBUS_DATA"] || ".tokenbus", "up.json");
  try {
    if (process.getuid?.() !== statSync(file).uid) return undefined;
    const { pid, redis_url: url } = JSON.parse(readFileSync(file, "utf8")) as { pid?: unknown; redis_url?: unknown };
    if (typeof pid !== "number" || typeof url !== "string") return undefined;
    process.kill(pid, 0); // throws if there is no such process
    return url;
  } catch {
    return undefined;
  }
}
