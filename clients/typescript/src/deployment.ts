/** Which deployment a client talks to: the server, and the keys as `<prefix>:meta` tells them. */

import type { Connection } from "./connection.js";
import { DeploymentMismatch, Malformed, ServerUnavailable } from "./errors.js";
import { DATA_FIELD, Keys, WIRE_VERSION } from "./keys.js";

export class Deployment {
  #keys: Keys | undefined;

  constructor(readonly url: string, readonly prefix: string, readonly reconnectMs: number) {}

  get requests(): string {
    return `${this.prefix}:requests`;
  }

  /** The names of the keys. Throws DeploymentMismatch; ServerUnavailable, also while no deployment is there. */
  async keys(connection: Connection): Promise<Keys> {
    if (this.#keys) return this.#keys;
    const meta = `${this.prefix}:meta`;
    const [partitions, version] = await connection.use((redis) => redis.hmGet(meta, ["partitions", "wire_version"]));
    if (!partitions || !version) throw new ServerUnavailable(`no deployment here yet: ${meta} is not written`);
    if (version !== WIRE_VERSION) {
      throw new DeploymentMismatch(`wire_version: this client speaks ${WIRE_VERSION}, the deployment ${version}`);
    }
    this.#keys = new Keys(this.prefix, Number(partitions));
    return this.#keys;
  }
}

/** What every event has, whatever its type. */
export interface Envelope {
  type: string;
  run: string;
}

/** The event in an entry's `__data__`, of whatever type: a newer server may write some that `types.ts` does not have. */
export function eventIn(stream: string, id: string, message: Record<string, string>, count: "seq" | "n"): Envelope {
  const data = message[DATA_FIELD];
  let value: unknown;
  try {
    value = data === undefined ? undefined : JSON.parse(data);
  } catch {
    value = undefined;
  }
  if (!isEnvelope(value, count)) throw new Malformed(`${stream} ${id}`, "no public event");
  return value;
}

function isEnvelope(value: unknown, count: "seq" | "n"): value is Envelope {
  if (typeof value !== "object" || value === null) return false;
  const found = value as Record<string, unknown>;
  return typeof found["type"] === "string" && typeof found["run"] === "string" && Number.isSafeInteger(found[count]);
}
