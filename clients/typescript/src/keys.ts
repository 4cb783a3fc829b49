/** The names of keys, as shared/tokenbus/bus/keys.py has them: a run's keys and its partition share the tag `{n}`. */

import { crc32 } from "node:zlib";

export const WIRE_VERSION = "1";
export const DATA_FIELD = "__data__";
export const TOPICS = ["visible", "chunks", "blocks", "runs", "decisions"] as const;
export type Topic = (typeof TOPICS)[number];

export class Keys {
  constructor(readonly prefix: string, readonly partitions: number) {}

  /** `crc32(run) mod P`. */
  partitionOf(run: string): number {
    return crc32(run) % this.partitions;
  }

  topic(partition: number, topic: Topic): string {
    return `${this.prefix}:{${partition}}:${topic}`;
  }

  run(run: string): string {
    return `${this.prefix}:{${this.partitionOf(run)}}:run:${run}`;
  }

  log(run: string): string {
    return `${this.prefix}:{${this.partitionOf(run)}}:log:${run}`;
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
