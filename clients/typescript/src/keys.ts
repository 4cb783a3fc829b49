/** The names of keys, as shared/tokenbus/bus/keys.py has them: a run's keys and its partition share the tag `{n}`. */

import { createHash } from "node:crypto";
import { crc32 } from "node:zlib";

/** Version 2 is a deployment whose number of partitions was changed. */
export const WIRE_VERSIONS = ["1", "2"];
export const DATA_FIELD = "__data__";
export const TOPICS = ["visible", "chunks", "blocks", "runs", "decisions", "sessions"] as const;
export type Topic = (typeof TOPICS)[number];

/** The run at the top of the tree; the run itself if no call of another began it. */
export function rootOf(run: string): string {
  return run.replace(/(?<=.)(~\d{1,9})+$/s, "");
}

/** A session's name in keys. */
export function sessionRef(tenant: string, name: string): string {
  return `s.${createHash("sha256").update(`${tenant}\0${name}`).digest("hex").slice(0, 24)}`;
}

/** What the event of a topic is in order with: its run, or its session, under a name that tells the partition as a run's does. */
export function orderOf(event: { run?: string; session_seq?: number; session?: string; tenant?: string; made?: string }): string {
  return event.session_seq === undefined ? (event.run ?? "") : `${sessionRef(event.tenant ?? "", event.session ?? "")}.${event.made}`;
}

/** The part of a run's id that decides its partition: of a child run that of its root, of a session's run the session. */
function placing(run: string): string {
  const root = rootOf(run);
  return /^s\.[0-9a-f]{24}(\.|$)/.test(root) ? root.slice(0, 26) : root;
}

/** What the deployment has agreed on. A change of the number of partitions makes new ones. */
export class Keys {
  /**
   * `numbers`: by which runs may be placed that are kept, first that of new runs. `partitions`: how many may have
   * entries, the largest number ever. `fewest`: the smallest number ever.
   */
  constructor(
    readonly prefix: string,
    readonly numbers: readonly [number, ...number[]],
    readonly partitions: number = numbers[0],
    readonly fewest: number = numbers[0],
  ) {}

  /** `crc32(run) mod P`: the partition of a new run. Runs of one session are in one partition. */
  partitionOf(run: string): number {
    return crc32(placing(run)) % this.numbers[0];
  }

  /** The partitions where the run may be, first that of a new one. */
  places(run: string): number[] {
    return [...new Set(this.numbers.map((number) => crc32(placing(run)) % number))];
  }

  topic(partition: number, topic: Topic): string {
    return `${this.prefix}:{${partition}}:${topic}`;
  }

  run(run: string, partition: number): string {
    return `${this.prefix}:{${partition}}:run:${run}`;
  }

  log(run: string, partition: number): string {
    return `${this.prefix}:{${partition}}:log:${run}`;
  }
}

/** An entry id as numbers: those of a log are `<attempt>-<seq>`, those of a topic `<ms>-<n>`. */
export function idParts(id: string): [bigint, bigint] {
  const [first = "0", second = "0"] = id.split("-");
  return [BigInt(first), BigInt(second)];
}

export function isAfter(id: string, other: string): boolean {
  const [a, b] = idParts(id);
  const [c, d] = idParts(other);
  return a > c || (a === c && b > d);
}
