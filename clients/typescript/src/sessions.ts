/** Lists the sessions of a deployment by the time of their last event. */

import type { Deployment } from "./deployment.js";
import { newestOf } from "./runs.js";

const FIELDS = ["name", "tenant", "begun", "provider", "model", "metadata", "begins", "runs", "run", "deleting"];

/** Times are Unix times in ms of the server's clock. */
export interface SessionInfo {
  /** Its name within the tenant. */
  session: string;
  tenant?: string;
  begunMs: number;
  /** Of its last append, or of the end of its last run. */
  lastMs: number;
  /** Provider, model and metadata are those of its configuration. */
  provider: string;
  model: string;
  metadata: Record<string, unknown>;
  /** The beginning of its first message. */
  begins: string;
  /** How many runs it has had, the open one included. */
  runs: number;
  /** The open one. */
  run?: string;
  /** How many messages wait. */
  waiting: number;
}

export interface SessionsOptions {
  /** Left out: those of all tenants. */
  tenant?: string;
  /** Only sessions whose configuration has these values in its metadata. */
  metadata?: Record<string, unknown>;
  /** Only sessions that have each of these words in their name, their first message or their metadata. */
  words?: string;
  /** At most so many, 1 to 1,000. Default 100. */
  limit?: number;
  signal?: AbortSignal;
}

export function listSessions(deployment: Deployment, options: SessionsOptions): Promise<SessionInfo[]> {
  const { tenant, metadata = {}, words = "" } = options;
  return newestOf<SessionInfo>(deployment, options, {
    sets: (base) => [`${base}:index:sessions${tenant ? `:${tenant}` : ""}`],
    read: (use, base, page) =>
      use((redis) =>
        Promise.all(
          page.map(async ({ value, score }) => {
            const key = `${base}:session:${value}`;
            const [fields, waiting] = await Promise.all([redis.hmGet(key, FIELDS), redis.zCard(`${key}:queue`)]);
            return infoOf(fields, score, waiting);
          }),
        ),
      ),
    wants: (info) => passes(info, metadata, words),
    at: ({ lastMs }) => lastMs,
  });
}

function passes(info: SessionInfo, metadata: Record<string, unknown>, words: string): boolean {
  if (Object.entries(metadata).some(([name, value]) => JSON.stringify(info.metadata[name]) !== JSON.stringify(value))) return false;
  const text = [info.session, info.begins, ...Object.values(info.metadata).map(String)].join(" ").toLowerCase();
  return words.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

function infoOf(fields: (string | null)[], lastMs: number, waiting: number): SessionInfo | undefined {
  const [name, tenant, begun, provider, model, metadata, begins, runs, run, deleting] = fields;
  if (!name || deleting) return undefined; // deleted or expired meanwhile
  return {
    session: name,
    ...(tenant ? { tenant } : {}),
    begunMs: Number(begun ?? 0),
    lastMs,
    provider: provider ?? "",
    model: model ?? "",
    metadata: JSON.parse(metadata || "{}") as Record<string, unknown>,
    begins: begins ?? "",
    runs: Number(runs ?? 0),
    ...(run ? { run } : {}),
    waiting,
  };
}
