/** Which events of a topic a subscriber wants, as Python's `kinds` and `runs` say. */

import type { Envelope } from "./deployment.js";
import { InvalidArgument } from "./errors.js";
import { BLOCK_KINDS, EVENT_KINDS } from "./generated.js";
import type { Topic } from "./keys.js";

export interface Filter {
  /** Types of events (`block_complete`, `failed`) and kinds of blocks (`tool_call`). With both, an event must match one of each. */
  kinds?: string | readonly string[];
  /** Ids, or a predicate on ids. A set may grow while it is in use. */
  runs?: string | readonly string[] | ReadonlySet<string> | ((run: string) => boolean);
}

/** Throws InvalidArgument for a kind that the topic never has: such a subscription would be silent for ever. */
export function wants(topic: Topic, { kinds, runs }: Filter): (event: Envelope) => boolean {
  const types: readonly string[] = EVENT_KINDS[topic];
  const blocks: readonly string[] = ["visible", "chunks", "blocks"].includes(topic) ? BLOCK_KINDS : [];
  const named = kinds === undefined ? undefined : new Set(typeof kinds === "string" ? [kinds] : kinds);
  for (const kind of named ?? []) {
    if (![...types, ...blocks].includes(kind)) throw new InvalidArgument(`kinds of ${topic}: ${kind} is none of ${[...types, ...blocks].join(", ")}`);
  }
  const ofType = types.filter((type) => named?.has(type));
  const ofBlock = blocks.filter((block) => named?.has(block));
  const ids = typeof runs === "string" || Array.isArray(runs) ? new Set<string>([runs].flat()) : (runs as ReadonlySet<string> | ((run: string) => boolean) | undefined);
  return (event) => {
    const { kind } = event as { kind?: string };
    if (named && !(ofType.length > 0 ? ofType : types.filter((type) => type !== "tool_progress")).includes(event.type)) return false;
    if (named && named.size === 0) return false;
    if (ofBlock.length > 0 && kind !== undefined && !ofBlock.includes(kind)) return false;
    return ids === undefined || (typeof ids === "function" ? ids(event.run) : ids.has(event.run));
  };
}
