/** A run's events folded into what it gave. */

import { isEnd } from "./follow.js";
import { InvalidArgument, RunCancelled, RunFailed, RunIncomplete } from "./errors.js";
import type { BlockComplete, PublicEvent, TerminalEvent, Usage } from "./types.js";

export interface Response {
  run: string;
  status: TerminalEvent["type"];
  /** The visible text: the blocks of a turn one after another, and a blank line between two turns. */
  text: string;
  thinking: string;
  /** In order of their numbers; those that a retry made void are left out. `cut` marks one that is only a beginning. */
  blocks: BlockComplete[];
  /** Sum over the run's turns and attempts. */
  usage: Usage | undefined;
  /** The terminal event: `finish`, `timing`, `model` and what else it says. */
  end: TerminalEvent;
}

/** Fold the events of one run up to its end. Throws InvalidArgument if they have none. */
export async function responseOf(events: AsyncIterable<PublicEvent> | Iterable<PublicEvent>): Promise<Response> {
  const blocks = new Map<number, BlockComplete>();
  for await (const event of events) {
    if (event.type === "block_complete") blocks.set(event.block, event);
    else if (event.type === "retrying" || event.type === "restarted") {
      for (const n of blocks.keys()) if (n >= event.drop_from) blocks.delete(n);
    } else if (isEnd(event)) return response(event, [...blocks.values()].sort((a, b) => a.block - b.block));
  }
  throw new InvalidArgument("these events have no end");
}

function response(end: TerminalEvent, blocks: BlockComplete[]): Response {
  const texts = new Map<number, string>();
  let thinking = "";
  for (const block of blocks) {
    const content = block.content ?? "";
    if (block.kind === "text") texts.set(block.turn, (texts.get(block.turn) ?? "") + content);
    if (block.kind === "thinking") thinking += content;
  }
  const text = [...texts.values()].filter((one) => one !== "").join("\n\n");
  return { run: end.run, status: end.type, text, thinking, blocks, usage: end.usage, end };
}

/** The response of a run that completed. Throws RunFailed, RunIncomplete or RunCancelled, which carry it. */
export function orThrow(response: Response): Response {
  const { end } = response;
  if (end.type === "failed") throw new RunFailed(response, end.error);
  if (end.type === "incomplete") throw new RunIncomplete(response, end.reason);
  if (end.type === "cancelled") throw new RunCancelled(response, end.reason);
  return response;
}
